"""Sweeps: presses x ratios x seeds over examples, with one dense prefill per context.

Work is split into *units*, each one context with a fixed group of (press, ratio, seed) settings and all its questions.
A unit's rows are written together, and what is in a unit never depends on what has been done already, so a run that was
killed and continued computes exactly what an undisturbed run computes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kvpress import KVPressTextGenerationPipeline
from tqdm import tqdm

from kvpress_prob.examples.metrics import score_prediction
from kvpress_prob.examples.tasks import load_examples
from kvpress_prob.models.loading import load_pipeline, load_tokenizer
from kvpress_prob.prefills.attention_error import AttentionError, DenseQuestion, attention_errors
from kvpress_prob.prefills.compressors import Compressor, compressor, draws
from kvpress_prob.prefills.decoding import Answer, RowBatch, decode_batch, decode_single
from kvpress_prob.prefills.press_spec import NO_PRESS, PressSpec
from kvpress_prob.prefills.shared_prefill import Compressed, SharedPrefill
from kvpress_prob.records import Example, Record, config_hash, text_hash
from kvpress_prob.records.writer import Key, RecordWriter, results_folder
from kvpress_prob.sweeps.configuration import SweepConfig


@dataclass(frozen=True)
class Setting:
    """One press at one ratio and seed."""

    spec: PressSpec
    ratio: float
    seed: int | None


@dataclass(frozen=True)
class Unit:
    """What is computed and written together: one context, all its questions, some settings."""

    context: str
    examples: list[Example]
    settings: list[Setting]

    @property
    def keys(self) -> frozenset[Key]:
        """Keys of the unit's records."""
        return frozenset(
            (example.name, setting.spec.name, setting.ratio, setting.seed)
            for example in self.examples
            for setting in self.settings
        )


def settings_of(config: SweepConfig) -> list[Setting]:
    """All settings in the order in which they are run: press by press."""
    settings = []
    for spec in config.specs:
        ratios = [0.0] if spec.press == NO_PRESS else config.ratios
        seeds: list[int | None] = list(config.seeds) if draws(spec.build()) else [None]
        settings += [Setting(spec, ratio, seed) for ratio in ratios for seed in seeds]
    return settings


def plan(config: SweepConfig, examples: list[Example]) -> list[list[Unit]]:
    """The units of every context."""
    contexts: dict[str, list[Example]] = {}
    for example in examples:
        contexts.setdefault(example.context, []).append(example)
    settings = settings_of(config)
    size = 1 if config.decode == "single" else config.batch_rows
    groups = [settings[begin : begin + size] for begin in range(0, len(settings), size)]
    return [[Unit(context, group, part) for part in groups] for context, group in contexts.items()]


class Worker:
    """Runs units with one loaded model."""

    def __init__(self, config: SweepConfig, pipe: KVPressTextGenerationPipeline | None = None):
        self.config = config
        self.hash = config_hash(config.plain())
        self.pipe = pipe or load_pipeline(
            config.model, dtype=config.dtype, device=config.device, attn_implementation=config.attn_implementation
        )

    @torch.inference_mode()
    def run(self, units: list[Unit]) -> Iterator[list[Record]]:
        """Records of units that share a context, unit by unit."""
        shared = SharedPrefill.run(self.pipe.model, self._ids(units[0].context, "", "")[0])
        presses: dict[str, Compressor] = {}
        for unit in units:
            for name in presses.keys() - {setting.spec.name for setting in unit.settings}:
                del presses[name]
            rows = []
            for setting in unit.settings:
                if setting.spec.name not in presses:
                    presses[setting.spec.name] = compressor(setting.spec.build(), shared)
                rows.append(presses[setting.spec.name].compress(setting.ratio, setting.seed))
            yield self._records(shared, unit, rows)

    def _records(self, shared: SharedPrefill, unit: Unit, rows: list[Compressed]) -> list[Record]:
        """Decode and measure every question of a unit."""
        config = self.config
        questions = [self._ids(unit.context, example.question, example.answer_prefix)[1] for example in unit.examples]
        limits = [config.max_new_tokens or example.max_new_tokens for example in unit.examples]
        batch = None
        if config.decode == "batched":
            room = max(question.shape[1] + limit for question, limit in zip(questions, limits, strict=True))
            batch = RowBatch(shared, rows, room)
        records = []
        for example, question, limit in zip(unit.examples, questions, limits, strict=True):
            answers: list[Answer | None] = [None] * len(rows)
            errors: list[AttentionError | None] = [None] * len(rows)
            if batch is not None:
                answers = list(decode_batch(self.pipe, batch, question, limit))
            elif config.decode == "single":
                answers = [decode_single(self.pipe, row, shared.tokens, question, limit) for row in rows]
            if config.attention_error:
                errors = list(attention_errors(shared, DenseQuestion(shared, question), rows, question.shape[1]))
            records += [
                self._record(shared, example, len(rows), *parts)
                for parts in zip(unit.settings, rows, answers, errors, strict=True)
            ]
        return records

    def _record(
        self,
        shared: SharedPrefill,
        example: Example,
        rows: int,
        setting: Setting,
        row: Compressed,
        answer: Answer | None,
        error: AttentionError | None,
    ) -> Record:
        milliseconds = None if answer is None else round(answer.milliseconds, 2)
        batched = self.config.decode == "batched"
        return Record(
            example=example.name,
            context=text_hash(example.context),
            task=example.task,
            press=setting.spec.name,
            ratio=setting.ratio,
            seed=setting.seed,
            query_aware=self.config.query_aware,
            masked=bool(row.masked),
            achieved_ratio=round(sum(row.layer_ratios) / len(row.layer_ratios), 6),
            layer_ratios=[round(ratio, 4) for ratio in row.layer_ratios],
            effective_fraction=row.effective_fraction,
            context_tokens=shared.tokens,
            dense_bytes=shared.nbytes,
            cache_bytes=row.nbytes,
            prefill_ms=round(shared.milliseconds, 2),
            score_ms=round(row.costs.score_ms, 2),
            score_spent_ms=round(row.costs.spent_ms, 2),
            compress_ms=round(row.costs.compress_ms, 2),
            decode=self.config.decode,
            decode_ms=None if batched else milliseconds,
            batch_ms=milliseconds if batched else None,
            batch_rows=rows if batched else None,
            generated_tokens=None if answer is None else answer.tokens,
            prediction=None if answer is None else answer.text,
            score=None
            if answer is None
            else score_prediction(example.benchmark, example.task, answer.text, example.answers, example.all_classes),
            attention_error=None if error is None else error.relative,
            attention_error_abs=None if error is None else error.absolute,
            config=self.hash,
        )

    def _ids(self, context: str, question: str, answer_prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [1, n] of context and question, by kvpress' own rules."""
        tokenizer: Any = self.pipe.tokenizer
        limit = min(tokenizer.model_max_length, int(1e10))
        inputs = self.pipe.preprocess(context, [question], answer_prefix, limit)
        device = self.pipe.model.device
        return inputs["context_ids"].to(device), inputs["questions_ids"][0].to(device)


def examples_of(config: SweepConfig) -> list[Example]:
    """The examples of a configuration."""
    tokenizer = load_tokenizer(config.model)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    examples = load_examples(
        config.benchmark,
        config.data,
        count_tokens=count_tokens,
        tasks=config.tasks,
        length=config.length,
        examples_per_task=config.examples_per_task,
        max_context_tokens=config.max_context_tokens,
        seed=config.data_seed,
    )
    return [_with_question_inside(example) for example in examples] if config.query_aware else examples


def _with_question_inside(example: Example) -> Example:
    return Example(**{**asdict(example), "context": example.context + example.question, "question": ""})


def run_sweep(config: SweepConfig, output: Path, *, progress: bool = True) -> Path:
    """Run what is missing of a sweep, in this process.

    Returns
    -------
    Path
        The results folder.
    """
    examples = examples_of(config)
    contexts = plan(config, examples)
    worker = Worker(config)
    with open_results(config, output, examples, contexts) as writer, progress_bar(contexts, writer, progress) as bar:
        for units in missing(contexts, writer):
            for records in worker.run(units):
                writer.append(records)
                bar.update(len(records))
    return writer.folder


def open_results(
    config: SweepConfig, output: Path, examples: list[Example], contexts: list[list[Unit]]
) -> RecordWriter:
    """The results folder of a sweep, made or continued."""
    units = {key: unit.keys for units in contexts for unit in units for key in unit.keys}
    plain = config.plain()
    return RecordWriter(results_folder(output, plain), plain, examples, units.__getitem__)


def missing(contexts: list[list[Unit]], writer: RecordWriter) -> list[list[Unit]]:
    """Units that are not written yet, by context."""
    left = [[unit for unit in units if not unit.keys <= writer.done] for units in contexts]
    return [units for units in left if units]


def progress_bar(contexts: list[list[Unit]], writer: RecordWriter, show: bool) -> tqdm:
    """Rows done and the time left."""
    total = sum(len(unit.keys) for units in contexts for unit in units)
    return tqdm(total=total, initial=len(writer.done), unit="row", desc=writer.folder.name, disable=not show)
