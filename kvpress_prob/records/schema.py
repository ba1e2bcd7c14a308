"""What an evaluation asks and what it notes: the schema of its examples and of its records."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from kvpress_prob.records.provenance import git_commit, text_hash, versions

Benchmark = Literal["ruler", "longbench"]
DecodeMode = Literal["single", "batched", "none"]
Key = tuple[str, str, float, int | None]
"""What identifies a record within a run: example, press, ratio, seed."""
NO_PRESS = "no_press"
"""The dense cache, in configurations and in records."""


@dataclass(frozen=True)
class Example:
    """A question about a context, in kvpress' schema.

    Attributes
    ----------
    name : str
        Unique within a run: task and number.
    benchmark : {"ruler", "longbench"}
    task : str
    context : str
        The text whose cache is compressed; not written to result files.
    question, answer_prefix : str
    answers : list of str
    max_new_tokens : int
    all_classes : list of str or None
        Class names of LongBench's classification tasks.
    """

    name: str
    benchmark: Benchmark
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
        Target compression ratio. Where the budget is a number of entries, that of a context of the configuration's
        ``length``; the context's own follows from ``achieved_ratio``.
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
    padded_ratio : float or None
        Entries that caches with one length for all heads of a layer would hold, over kept entries; None in records of
        before it was measured.
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
    versions: str = field(default_factory=versions)
    git_commit: str | None = field(default_factory=git_commit)
    padded_ratio: float | None = None

    @property
    def key(self) -> Key:
        """What identifies a record within a run."""
        return self.example, self.press, self.ratio, self.seed


TIMINGS = ("prefill_ms", "score_ms", "score_spent_ms", "compress_ms", "decode_ms", "batch_ms")
"""Fields of a record that differ between two runs of one configuration."""

RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "score": ("in [0, 100]", lambda value: 0 <= value <= 100),
    "ratio": ("in [0, 1)", lambda value: 0 <= value < 1),
    **{
        name: ("at least 0", lambda value: value >= 0) for name in ("seed", "cache_bytes", "generated_tokens", *TIMINGS)
    },
    **{
        name: ("at least 1", lambda value: value >= 1)
        for name in ("context_tokens", "dense_bytes", "batch_rows", "max_new_tokens")
    },
}
"""Ranges of the fields that have one, in words and as a check."""
