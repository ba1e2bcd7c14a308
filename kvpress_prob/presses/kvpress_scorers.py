"""What the scores of kvpress' scorers are, and which entries they protect: known by class, never read off the scores.

kvpress' scorers mark what top-k must keep with scores above all others. As a distribution such marks are fatal, so they
are taken out; they always cover the first and the last entries of a context, and their number follows from the scorer's
settings. ``docs/proposals.md`` is written from this table.
"""

from collections.abc import Callable
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any, cast

from kvpress import (
    CapPress,
    CompactorPress,
    CriticalKVPress,
    CURPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzapPress,
    LagKVPress,
    LeverageScorePress,
    NonCausalAttnPress,
    ObservedAttentionPress,
    QFilterPress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

from kvpress_prob.maths.proposals import ScoresAre

Ends = Callable[[Any, int | None], tuple[int, int]]
"""(press, number of entries) -> how many of the first and of the last entries the press protects; at most, for None."""


@dataclass(frozen=True)
class ScoreRule:
    """How a scorer's scores are read.

    Attributes
    ----------
    scores_are : "weights", "log_weights", "logits" or None
        See ``maths.proposals.log_proposal``. None for a scorer that nobody has declared.
    common_scale : bool
        Whether scores of different heads and layers can be compared, as ``budget_weighting="score"`` does.
    ends : callable or None
        What the scorer protects; None for a scorer whose marks are not known: then ``take_all_stratum`` looks.
    note : str
        For the documentation.
    never_changes : bool
        Whether an entry's score depends on the entry alone, so that what comes later cannot change it.
    whole : bool
        Whether the scorer can only be asked about a whole prefill.
    """

    scores_are: ScoresAre | None = None
    common_scale: bool = True
    ends: Ends | None = None
    note: str = ""
    never_changes: bool = False
    whole: bool = False


def _nothing(press: Any, t: int | None) -> tuple[int, int]:
    return 0, 0


def _lag_ends(press: LagKVPress, t: int | None) -> tuple[int, int]:
    if t is None:
        return press.n_sink, 2 * press.lag_size - 1
    if t < press.n_sink + 2 * press.lag_size:
        return press.n_sink, 0
    return press.n_sink, press.lag_size + (t - press.n_sink) % press.lag_size


def _compactor_ends(press: CompactorPress, t: int | None) -> tuple[int, int]:
    return press.sink_size_start, press.sink_size_end


_WEIGHTS_AND_SINKS = ScoreRule("weights", ends=lambda press, t: (press.n_sink, 0), note="sinks are protected")

KVPRESS_SCORERS: dict[type[ScorerPress], ScoreRule] = {
    CapPress: ScoreRule(
        "weights",
        common_scale=False,
        ends=lambda press, t: (press.n_sink, 0),
        note="sinks are protected; weights relative to a head's largest",
    ),
    CompactorPress: ScoreRule(
        "logits", False, _compactor_ends, "both ends are protected; z-scores of a layer", whole=True
    ),
    CURPress: ScoreRule("weights", ends=lambda press, t: (press.num_sinks, 0), note="sinks are protected"),
    ExpectedAttentionPress: _WEIGHTS_AND_SINKS,
    KeyDiffPress: ScoreRule("logits", False, _nothing, "minus cosines"),
    KnormPress: ScoreRule("logits", False, _nothing, "minus norms", never_changes=True),
    KVzapPress: ScoreRule("log_weights", True, _nothing, "predicted logarithms of attention", never_changes=True),
    LagKVPress: ScoreRule(
        "weights", False, _lag_ends, "sinks and the last, incomplete partitions are protected; ranks of a partition"
    ),
    LeverageScorePress: ScoreRule("logits", False, _nothing, "z-scores of a layer", whole=True),
    NonCausalAttnPress: ScoreRule("logits", False, _nothing, "z-scores of a layer", whole=True),
    ObservedAttentionPress: ScoreRule("weights", True, _nothing, "needs attn_implementation='eager'", whole=True),
    QFilterPress: ScoreRule("logits", False, _nothing, "dot products with a filter", never_changes=True),
    RandomPress: ScoreRule("weights", True, _nothing, "uniform random numbers as weights"),
    SnapKVPress: ScoreRule("weights", ends=lambda press, t: (0, press.window_size), note="the window is protected"),
    StreamingLLMPress: ScoreRule(
        "weights",
        True,
        _nothing,
        "ones and zeros: alone it is StreamingLLM itself, the ones are its budget and are kept with weight 1; with "
        "`uniform_mix`, or as one of several components, it is drawn",
    ),
    TOVAPress: ScoreRule("weights", ends=lambda press, t: (0, 1), note="the last entry is protected"),
}
"""By the class that defines ``score``; subclasses that inherit it (PyramidKV, ExpectedAttentionStats) follow it."""


def score_rule(press: ScorerPress, scores_are: ScoresAre | None = None) -> ScoreRule:
    """What is known of a scorer: its row of ``KVPRESS_SCORERS``, with ``scores_are`` where it is given or declared.

    A class that overrides ``score`` of a class in the table is not in the table.

    Parameters
    ----------
    press : ScorerPress
        May declare ``scores_are`` and ``scores_never_change`` as attributes of its class.
    scores_are : "weights", "log_weights", "logits" or None
        Goes before what is declared and known.
    """
    declared = getattr(press, "scores_are", None) if scores_are is None else scores_are
    scoring = next(cls for cls in type(press).__mro__ if "score" in vars(cls))
    if scoring is CriticalKVPress:
        # Its first stage is marked with the largest number; what the inner scorer protects is among it or scaled.
        rule = _of_inner(score_rule(cast(CriticalKVPress, press).press))
    else:
        never_changes = bool(getattr(press, "scores_never_change", False))
        rule = KVPRESS_SCORERS.get(scoring, ScoreRule(never_changes=never_changes))
    if declared is None or declared == rule.scores_are:
        return rule
    return replace(rule, scores_are=declared, common_scale=declared != "logits")


def described(press: ScorerPress) -> str:
    """Class and settings of a scorer and of those inside it; not the ratio, which is set for every call."""
    settings = []
    for name, value in vars(press).items():
        if isinstance(value, ScorerPress):
            settings.append(f"{name}={described(value)}")
        elif name != "compression_ratio" and not name.startswith("_"):
            plain = value is None or is_dataclass(value) or isinstance(value, int | float | str | tuple | list | Path)
            settings.append(f"{name}={value!r}" if plain else f"{name}={type(value).__name__}")
    return f"{type(press).__name__}({', '.join(settings)})"


def _of_inner(rule: ScoreRule) -> ScoreRule:
    """The rule of a wrapper whose scorer has this one. Its marks follow from all entries."""
    ends = rule.ends
    rule = replace(rule, never_changes=False)
    return rule if ends is None else replace(rule, ends=lambda press, t: ends(press.press, t))
