"""Names for evaluation: ``make_press(name, compression_ratio)`` builds a new press each time, never a shared one.

``prob_min``, ``prob_min_h``, ``prob_h2o`` and ``prob_h2o_h`` are the paper's four proposals to the letter (multinomial
draws, count weights, uncentred values). ``prob_best`` is this package's default. The other ``prob_*`` wrap kvpress' own
scorers.
"""

from collections.abc import Callable

from kvpress import (
    ExpectedAttentionPress,
    KnormPress,
    ScorerPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

from kvpress_prob.presses.h2o_press import H2OPress
from kvpress_prob.presses.min_variance_press import MinVariancePress
from kvpress_prob.presses.probabilistic_press import ProbabilisticPress


def _paper(scorer: ScorerPress, seed: int | None) -> ProbabilisticPress:
    return ProbabilisticPress(scorer, sampler="multinomial", correction="counts", seed=seed)


PRESSES: dict[str, Callable[[int | None], ProbabilisticPress]] = {
    "prob_min": lambda seed: _paper(MinVariancePress(prior="last", centered=False), seed),
    "prob_min_h": lambda seed: _paper(MinVariancePress(prior="harmonic", centered=False), seed),
    "prob_h2o": lambda seed: _paper(H2OPress(prior="uniform"), seed),
    "prob_h2o_h": lambda seed: _paper(H2OPress(prior="harmonic"), seed),
    "prob_best": lambda seed: ProbabilisticPress(MinVariancePress(prior="harmonic"), seed=seed),
    "prob_snapkv": lambda seed: ProbabilisticPress(SnapKVPress(), seed=seed),
    "prob_tova": lambda seed: ProbabilisticPress(TOVAPress(), seed=seed),
    "prob_knorm": lambda seed: ProbabilisticPress(KnormPress(), seed=seed),
    "prob_streaming_llm": lambda seed: ProbabilisticPress(StreamingLLMPress(), seed=seed),
    "prob_expected_attention": lambda seed: ProbabilisticPress(ExpectedAttentionPress(), seed=seed),
}


def make_press(name: str, compression_ratio: float = 0.0, seed: int | None = 0) -> ProbabilisticPress:
    """A new press by name.

    Parameters
    ----------
    name : str
        A key of ``PRESSES``.
    compression_ratio : float, default=0.0
    seed : int, optional, default=0
        Seed of the draw.

    Raises
    ------
    ValueError
        For an unknown name; the message lists the known ones.
    """
    if name not in PRESSES:
        raise ValueError(f"name must be one of {sorted(PRESSES)}, got {name!r}")
    press = PRESSES[name](seed)
    press.compression_ratio = compression_ratio
    return press
