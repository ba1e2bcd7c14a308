"""Names for evaluation: ``make_press(name, compression_ratio)`` builds a new press each time, never a shared one.

``prob_min``, ``prob_min_h``, ``prob_h2o`` and ``prob_h2o_h`` are the paper's four proposals to the letter (multinomial
draws, count weights, uncentred values). ``prob_best`` is this package's best, from rows that repeat the context and
rows that read it; ``prob_learned`` reads the first off the hidden states and makes no pass (``kvpress-prob fit``);
``prob_fast`` reads only. The other ``prob_*`` wrap kvpress' own scorers; ``prob_kvzip`` is KVzip's scores and selection
without its prompt, and memory that drops. ``lore`` is LORE-KV: the cost of deleting an entry, behind the output
projection, over what the model would say next; every head keeps as many, the largest. ``prob_lore`` draws from the same
costs and weighs what it kept. ``contourkv`` and ``contourkv_window`` are ContourKV: KVzip's scores or SnapKV's, one
threshold for the heads of all layers, and the newest 32 entries of each; give them ``entries_per_head``.

``PHYSICAL_PRESSES`` are kvpress' own presses that hide entries, by the names and with the settings of its evaluation
registry, in a ``PhysicalPress``: the same answers, and memory that drops.
"""

from collections.abc import Callable
from dataclasses import replace

from kvpress import (
    AdaKVPress,
    CriticalAdaKVPress,
    DuoAttentionPress,
    ExpectedAttentionPress,
    KnormPress,
    KVgradPress,
    KVzipPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

from kvpress_prob.hf import CacheBudget
from kvpress_prob.maths.arguments import check_ratio
from kvpress_prob.presses.attention_press import AttentionPress
from kvpress_prob.presses.component import Component
from kvpress_prob.presses.h2o_press import H2OPress
from kvpress_prob.presses.min_variance_press import MinVariancePress
from kvpress_prob.presses.physical_press import PhysicalPress
from kvpress_prob.presses.probabilistic_press import ProbabilisticPress
from kvpress_prob.presses.surrogate_press import SurrogatePress
from kvpress_prob.sources import Lookahead, Reconstruction


def _paper(scorer: ScorerPress, seed: int | None) -> ProbabilisticPress:
    return ProbabilisticPress(scorer, sampler="multinomial", correction="counts", seed=seed)


def _reconstruction() -> AttentionPress:
    return AttentionPress(source=Reconstruction(), statistic="max")


def _lookahead() -> AttentionPress:
    return AttentionPress(source=Lookahead(), statistic="output_change", project=True)


def _contour(scorer: ScorerPress, seed: int | None) -> ProbabilisticPress:
    """One threshold for all heads of all layers, beside the newest 32 entries of each."""
    return ProbabilisticPress(
        scorer, sampler="top_k", correction="none", budget_weighting="score", n_recent=32, seed=seed
    )


def reconstruction_share(compression_ratio: float) -> float:
    """Share of the budget of ``prob_best`` that goes to what a question may look up: 0.55 at r = 0.5, 0.93 at r = 0.9.

    The rest keeps the text fluent. What a question needs is a number of entries rather than a share of them, so its
    share of a smaller budget is larger. Found on rows that are not reported on.
    """
    return 1 - (1 - compression_ratio) ** 1.15


def learned_share(compression_ratio: float) -> float:
    """Share of the budget of ``prob_learned`` that goes to the surrogate's draw: 0.38 at r = 0.5, 0.80 at r = 0.9.

    Less than ``reconstruction_share``: it keeps as many facts on the rows that it was found on, and the text's
    divergence is a quarter to two fifths lower.
    """
    return 1 - (1 - compression_ratio) ** 0.7


PRESSES: dict[str, Callable[[int | None], ProbabilisticPress]] = {
    "prob_min": lambda seed: _paper(MinVariancePress(prior="last", centered=False), seed),
    "prob_min_h": lambda seed: _paper(MinVariancePress(prior="harmonic", centered=False), seed),
    "prob_h2o": lambda seed: _paper(H2OPress(prior="uniform"), seed),
    "prob_h2o_h": lambda seed: _paper(H2OPress(prior="harmonic"), seed),
    "prob_best": lambda seed: ProbabilisticPress(
        [
            Component(_reconstruction(), reconstruction_share, budget_weighting="score", proposal_temperature=0.25),
            Component(MinVariancePress(prior="harmonic")),
        ],
        max_weight=5.0,
        seed=seed,
    ),
    "prob_learned": lambda seed: ProbabilisticPress(
        [
            Component(SurrogatePress(), learned_share, budget_weighting="score", proposal_temperature=0.25),
            Component(MinVariancePress(prior="harmonic", max_rows=64)),
        ],
        max_weight=5.0,
        n_sink=4,
        seed=seed,
    ),
    "prob_fast": lambda seed: ProbabilisticPress(MinVariancePress(prior="harmonic"), seed=seed),
    "prob_kvzip": lambda seed: ProbabilisticPress(
        _reconstruction(), sampler="top_k", correction="none", budget_weighting="score", n_sink=4, seed=seed
    ),
    "contourkv": lambda seed: _contour(
        AttentionPress(source=Reconstruction(prompt="kvzip", n_sink=4), statistic="max"), seed
    ),
    "contourkv_window": lambda seed: _contour(SnapKVPress(window_size=32), seed),
    "lore": lambda seed: ProbabilisticPress(
        _lookahead(), sampler="top_k", correction="none", allocation="head", seed=seed
    ),
    "prob_lore": lambda seed: ProbabilisticPress(_lookahead(), allocation="head", seed=seed),
    "prob_snapkv": lambda seed: ProbabilisticPress(SnapKVPress(), seed=seed),
    "prob_tova": lambda seed: ProbabilisticPress(TOVAPress(), seed=seed),
    "prob_knorm": lambda seed: ProbabilisticPress(KnormPress(), seed=seed),
    "prob_streaming_llm": lambda seed: ProbabilisticPress(StreamingLLMPress(), seed=seed),
    "prob_expected_attention": lambda seed: ProbabilisticPress(ExpectedAttentionPress(), seed=seed),
}


PHYSICAL_PRESSES: dict[str, Callable[[], PhysicalPress]] = {
    "adakv_snapkv_physical": lambda: PhysicalPress(AdaKVPress(SnapKVPress())),
    "critical_adakv_snapkv_physical": lambda: PhysicalPress(CriticalAdaKVPress(SnapKVPress())),
    "expected_attention_physical": lambda: PhysicalPress(AdaKVPress(ExpectedAttentionPress(epsilon=1e-2))),
    "kvzip_physical": lambda: PhysicalPress(KVzipPress()),
    "kvgrad_physical": lambda: PhysicalPress(KVgradPress()),
    "duo_attention_physical": lambda: PhysicalPress(DuoAttentionPress()),
}


def make_press(
    name: str, compression_ratio: float = 0.0, seed: int | None = 0, budget: CacheBudget | None = None
) -> ProbabilisticPress | PhysicalPress:
    """A new press by name.

    Parameters
    ----------
    name : str
        A key of ``PRESSES`` or ``PHYSICAL_PRESSES``.
    compression_ratio : float, default=0.0
        DuoAttention takes it as the ratio of its heads.
    seed : int, optional, default=0
        Seed of the draw, for the presses that draw.
    budget : CacheBudget, optional, default=None
        What the cache may hold at any time (docs/bounded.md), for presses that draw and make no second pass.

    Raises
    ------
    ValueError
        For an unknown name; the message lists the known ones. For a ratio outside [0, 1). For a budget that the press
        cannot keep to.
    """
    check_ratio(compression_ratio)
    if name not in PRESSES and name not in PHYSICAL_PRESSES:
        raise ValueError(f"name must be one of {sorted([*PRESSES, *PHYSICAL_PRESSES])}, got {name!r}")
    if name in PHYSICAL_PRESSES:
        if budget is not None:
            raise ValueError(f"budget must be None for {name}, which needs the finished prefill, got {budget}")
        press = PHYSICAL_PRESSES[name]()
        press.compression_ratio = compression_ratio
        return press
    return replace(PRESSES[name](seed), compression_ratio=compression_ratio, budget=budget)
