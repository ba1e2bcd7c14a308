"""Every scorer of kvpress as a proposal, one row each, and the page that is written from them: ``python -m
tests.helpers.scorers``."""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import kvpress
import torch
from kvpress import BasePress, ScorerPress
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel

from kvpress_prob.presses.kvpress_scorers import score_rule

PATH = Path(__file__).parents[2] / "docs" / "proposals.md"

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 4, 64, 8, 4, 32
"""The model that the rows are tested with."""


def _expected_with_stats() -> ScorerPress:
    """With statistics made here instead of the Hub's."""
    press = kvpress.ExpectedAttentionStatsPress()
    press.mu = torch.randn(LAYERS, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    press.cov = torch.eye(HEAD_DIM).expand(LAYERS, HEADS, -1, -1)
    return press


def _kvzap() -> ScorerPress:
    """With weights made here; named as the Hub's for a model without a name, so nothing is looked for there."""
    press = kvpress.KVzapPress(model_type="linear")
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        press.kvzap_model = KVzapModel(KVzapConfig(input_dim=HIDDEN, output_dim=KV_HEADS, n_modules=LAYERS))
    press.kvzap_model_name = "nvidia/KVzap-linear-"
    return press


def _q_filter() -> ScorerPress:
    """With filters made here."""
    press = kvpress.QFilterPress()
    press.q_filters = torch.randn(LAYERS, KV_HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    press.post_init_from_model = lambda model: None
    return press


@dataclass(frozen=True)
class Row:
    """One scorer: how the tests make it, what of its ends it then protects, a note that replaces its rule's."""

    make: Callable[[], ScorerPress]
    ends: tuple[int, int] = (0, 0)
    note: str = ""

    @property
    def common_scale(self) -> bool:
        return score_rule(self.make()).common_scale


SCORERS: dict[str, Row] = {
    "CURPress": Row(kvpress.CURPress, (4, 0)),
    "CapPress": Row(kvpress.CapPress, (4, 0)),
    "CompactorPress": Row(lambda: kvpress.CompactorPress(sketch_dimension=16), (8, 4)),
    "CriticalKVPress": Row(
        lambda: kvpress.CriticalKVPress(kvpress.SnapKVPress(window_size=8)),
        (0, 8),
        "what its scorer's are, and protects; half of the budget (`first_stage_ratio`) is protected too",
    ),
    "ExpectedAttentionPress": Row(kvpress.ExpectedAttentionPress, (4, 0)),
    "ExpectedAttentionStatsPress": Row(_expected_with_stats, (4, 0)),
    "KVzapPress": Row(_kvzap),
    "KeyDiffPress": Row(kvpress.KeyDiffPress),
    "KnormPress": Row(kvpress.KnormPress),
    "LagKVPress": Row(lambda: kvpress.LagKVPress(lag_size=16), (4, 16)),
    "LeverageScorePress": Row(lambda: kvpress.LeverageScorePress(sketch_dimension=16)),
    "NonCausalAttnPress": Row(kvpress.NonCausalAttnPress),
    "ObservedAttentionPress": Row(kvpress.ObservedAttentionPress),
    "PyramidKVPress": Row(
        lambda: kvpress.PyramidKVPress(window_size=8),
        (0, 8),
        "the window is protected; its budgets of layers are not used",
    ),
    "QFilterPress": Row(_q_filter),
    "RandomPress": Row(lambda: kvpress.RandomPress(seed=0)),
    "SnapKVPress": Row(lambda: kvpress.SnapKVPress(window_size=8), (0, 8)),
    "StreamingLLMPress": Row(kvpress.StreamingLLMPress),
    "TOVAPress": Row(kvpress.TOVAPress, (0, 1)),
}
"""Every ``ScorerPress`` of kvpress."""


def presses() -> list[type[BasePress]]:
    """Every press of kvpress but the two base classes."""
    found = [it for _, it in inspect.getmembers(kvpress, inspect.isclass) if issubclass(it, BasePress)]
    return [it for it in found if it not in (BasePress, ScorerPress)]


PAGE = """\
# Any scorer as a proposal

Written by `make models-table` from what `tests/presses/test_proposals.py` runs; a test fails when it is out of date.

A proposal is a function of its own scores. What becomes of a score depends on what the scorer says that it is:

| `scores_are` | proposal weights | |
|---|---|---|
| `weights` | `s^(1/T)` | amounts >= 0; values below 0 that are more than rounding are refused |
| `log_weights` | `exp(s/T)` | logarithms of amounts |
| `logits` | `softmax(s/T)` | any numbers that compare the entries of one head; `budget_weighting="score"` is refused |

`T` is `proposal_temperature`. Everything is computed from logarithms: small `T` approaches top-k, large `T` a uniform
draw. kvpress' own scorers are known by class (below). Another scorer declares `scores_are` as an attribute of its
class, or its user gives it: `Component(scorer, scores_are="logits")`. Of a scorer about which nobody says anything, a
head whose own scores go below 0 by more than a thousandth of its largest has logits, any other head weights; no other
head, layer or batch row has a say.

What a scorer protects is kept with weight 1 and leaves the budget and the draw. For kvpress' scorers it is known, too.
Of others one plateau of scores on top is believed: the largest number of the dtype, or the largest other score of the
layer plus one at the same places in every head, over floating scores whose range is below 1. Ranks, counts and other
integers, constants and one-hot scores protect nothing.

Scores are asked for each batch row alone and without its padding, so a row is compressed as it would be alone. They
must be finite real numbers of shape `[batch, KV heads, tokens]`, of any dtype.

Two warnings say why a ratio was not reached: protected entries alone exceed the budget, or fewer entries than the
budget have a score above 0, as when attention is so sharp that float32 holds 0 for most entries
(`MinVariancePress(prior="last")` of such a model). `uniform_mix=0.01` then gives every entry a probability.

## kvpress {version}

Each row: the ratio is reached with both samplers, protected entries are kept with weight 1, other entries are drawn,
and every row of a padded batch has the proposal that it has alone. "One scale" says whether `budget_weighting="score"`
works.

| press | scores are | protected | one scale | |
|---|---|---|---|---|
{scorers}

## Refused

With one `TypeError`, when the press is made: these are not scorers of entries. They choose, merge or change entries
themselves, or wrap other presses.

{others}
"""


def _ends(row: Row) -> str:
    first, last = row.ends
    return " and ".join(["first entries"] * bool(first) + ["last entries"] * bool(last)) or "nothing"


def page() -> str:
    """The page as it should be; a test compares."""
    rows = []
    for name, row in SCORERS.items():
        rule = score_rule(row.make())
        scale = "yes" if rule.common_scale else "no"
        kind = "those of its scorer" if name == "CriticalKVPress" else f"`{rule.scores_are}`"
        rows.append(f"| `{name}` | {kind} | {_ends(row)} | {scale} | {row.note or rule.note} |")
    others = [f"`{it.__name__}`" for it in presses() if not issubclass(it, ScorerPress)]
    lines = textwrap.fill(", ".join(others) + ".", 120, break_long_words=False)
    return PAGE.format(version=version("kvpress"), scorers="\n".join(rows), others=lines)


if __name__ == "__main__":
    PATH.write_text(page())
