"""Floor 0: the record schema of evaluations, and the files that hold records.

A results folder is named by its configuration's hash and holds::

    config.json      the configuration of the run
    examples.jsonl   one ``Example`` a line, without its context
    records.jsonl    one ``Record`` a line: one prediction, or one measurement, of one press on one example

Records refer to examples by name. Everything later (tables, figures, the report page) reads these files and nothing
else.
"""

import hashlib
import json
import subprocess
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

CONFIG, EXAMPLES, RECORDS = "config.json", "examples.jsonl", "records.jsonl"
PACKAGES = ("kvpress-prob", "kvpress", "torch", "transformers")
"""Packages whose versions every record names."""

DecodeMode = Literal["single", "batched", "none"]


@dataclass(frozen=True)
class Example:
    """A question about a context, in kvpress' schema.

    Attributes
    ----------
    name : str
        Unique within a run: task and number.
    benchmark, task : str
    context : str
        The text whose cache is compressed; not written to result files.
    question, answer_prefix : str
    answers : list of str
    max_new_tokens : int
    all_classes : list of str or None
        Class names of LongBench's classification tasks.
    """

    name: str
    benchmark: str
    task: str
    context: str
    question: str
    answer_prefix: str
    answers: list[str]
    max_new_tokens: int
    all_classes: list[str] | None = None

    def as_row(self) -> dict[str, Any]:
        """The line of ``examples.jsonl``: the context is replaced by its hash."""
        row = asdict(self)
        row["context"] = text_hash(self.context)
        return row


@dataclass(frozen=True)
class Record:
    """What one press at one ratio and seed did on one example.

    Attributes
    ----------
    example, context, task : str
        Name of the example, hash of its context, and its task.
    press : str
        Label of the press in the configuration.
    ratio : float
        Target compression ratio.
    seed : int or None
        None for a press that draws nothing.
    query_aware : bool
        Whether the question was part of the compressed context.
    masked : bool
        The press hides entries from attention but holds them all.
    achieved_ratio : float
        Evicted (or hidden) fraction of the entries of full-attention layers.
    layer_ratios : list of float
        The same per compressed layer.
    effective_fraction : float or None
        Effective sample size of the weights over kept entries; None for a press without weights.
    context_tokens : int
    dense_bytes, cache_bytes : int
        Measured bytes of the cache before and after compression.
    prefill_ms : float
        The dense prefill, spent once for all presses.
    score_ms, score_spent_ms : float
        What the press' scoring takes, and what of it was spent for this row: 0 where scores of another ratio, seed or
        press served.
    compress_ms : float
        Selection and eviction of this row.
    decode : {"single", "batched", "none"}
        One cache after the other as kvpress' pipeline does, several caches at once, or not at all.
    decode_ms : float or None
        Question and answer; None unless ``decode == "single"``, because a batch has no time of a single row.
    batch_ms, batch_rows : float or None, int or None
        Question and answer of the whole batch that the row was decoded in, and the number of its rows.
    generated_tokens : int or None
    prediction : str or None
    score : float or None
        0 to 100, by the benchmark's own scorer.
    attention_error, attention_error_abs : float or None
        Over the question's tokens, mean of all heads, layers and tokens: relative error of the attention output; and
        over the question's first token, mean absolute error.
    config : str
        Hash of the configuration.
    versions : str
    git_commit : str or None
    """

    example: str
    context: str
    task: str
    press: str
    ratio: float
    seed: int | None
    query_aware: bool
    masked: bool
    achieved_ratio: float
    layer_ratios: list[float]
    effective_fraction: float | None
    context_tokens: int
    dense_bytes: int
    cache_bytes: int
    prefill_ms: float
    score_ms: float
    score_spent_ms: float
    compress_ms: float
    decode: DecodeMode
    decode_ms: float | None
    batch_ms: float | None
    batch_rows: int | None
    generated_tokens: int | None
    prediction: str | None
    score: float | None
    attention_error: float | None
    attention_error_abs: float | None
    config: str
    versions: str = field(default_factory=lambda: versions())
    git_commit: str | None = field(default_factory=lambda: git_commit())

    @property
    def key(self) -> tuple[str, str, float, int | None]:
        """What identifies a record within a run."""
        return self.example, self.press, self.ratio, self.seed


TIMINGS = ("prefill_ms", "score_ms", "score_spent_ms", "compress_ms", "decode_ms", "batch_ms")
"""Fields of a record that differ between two runs of one configuration."""


def read_records(folder: Path) -> list[Record]:
    """All records of a results folder.

    Raises
    ------
    ValueError
        If the folder has no records, or a line is not a record of this schema.
    """
    names = {entry.name for entry in fields(Record)}
    records = []
    for number, row in enumerate(_lines(folder / RECORDS), 1):
        if set(row) != names:
            odd = sorted(set(row) ^ names)
            raise ValueError(
                f"{folder / RECORDS}, line {number}: fields must be the schema's, got a difference in {odd}"
            )
        records.append(Record(**row))
    if not records:
        raise ValueError(f"{folder / RECORDS} must hold records, got an empty file")
    return records


def read_examples(folder: Path) -> list[Example]:
    """The examples of a results folder; ``context`` is the context's hash."""
    return [Example(**row) for row in _lines(folder / EXAMPLES)]


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration of a results folder, as plain values."""
    return json.loads(_text(folder / CONFIG))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _text(path).splitlines()]


def _text(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"{path.parent} must be a results folder, got no {path.name}")
    return path.read_text(encoding="utf-8")


def to_line(row: dict[str, Any]) -> str:
    """One line of JSON, line end included."""
    return json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def config_hash(config: dict[str, Any]) -> str:
    """Ten hexadecimal digits that identify a configuration of plain values."""
    return text_hash(json.dumps(config, sort_keys=True))[:10]


def text_hash(text: str) -> str:
    """Sixteen hexadecimal digits that identify a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def versions() -> str:
    """``package version`` of ``PACKAGES``, separated by commas."""
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:  # imported from a source tree that is not installed
            found.append(f"{package} (not installed)")
    return ", ".join(found)


@cache
def git_commit() -> str | None:
    """Commit of the source tree that this package was imported from, with ``-dirty`` for local changes; None outside
    one."""
    here = Path(__file__)
    try:
        # An installed package may lie inside a repository of somebody else's.
        tracked = _git("ls-files", "--error-unmatch", here.name, cwd=here.parent)
        commit = _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*", cwd=here.parent)
    except FileNotFoundError:  # no git
        return None
    return commit if tracked else None


def _git(*arguments: str, cwd: Path) -> str | None:
    done = subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None
