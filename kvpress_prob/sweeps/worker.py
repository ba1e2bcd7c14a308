"""Runs units of a sweep with one loaded model: one dense prefill a context, of which every press compresses a copy."""

from collections.abc import Iterator
from typing import Any

import torch
from kvpress import KVPressTextGenerationPipeline

from kvpress_prob.examples.metrics import score_prediction
from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.prefills.attention_error import AttentionError, DenseQuestion, attention_errors
from kvpress_prob.prefills.compressors import Compressor, compressor
from kvpress_prob.prefills.decoding import Answer, RowBatch, decode_batch, decode_single
from kvpress_prob.prefills.shared_prefill import Compressed, SharedPrefill, padded_ratio
from kvpress_prob.records import Example, Record, config_hash, text_hash
from kvpress_prob.sweeps.configuration import SweepConfig
from kvpress_prob.sweeps.plan import Setting, Unit


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
                rows.append(presses[setting.spec.name].compress(setting.ratio_of(shared.tokens), setting.seed))
            yield self._records(shared, unit, rows)

    def _records(self, shared: SharedPrefill, unit: Unit, rows: list[Compressed]) -> list[Record]:
        """Decode and measure every question of a unit."""
        config = self.config
        questions = [self._ids(unit.context, example.question, example.answer_prefix)[1] for example in unit.examples]
        limits = [
            example.max_new_tokens if config.max_new_tokens is None else config.max_new_tokens
            for example in unit.examples
        ]
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
            padded_ratio=round(padded_ratio(row, shared.prefill.layers), 4),
        )

    def _ids(self, context: str, question: str, answer_prefix: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens [1, n] of context and question, by kvpress' own rules."""
        tokenizer: Any = self.pipe.tokenizer
        limit = min(tokenizer.model_max_length, int(1e10))
        inputs = self.pipe.preprocess(context, [question], answer_prefix, limit)
        device = self.pipe.model.device
        return inputs["context_ids"].to(device), inputs["questions_ids"][0].to(device)
