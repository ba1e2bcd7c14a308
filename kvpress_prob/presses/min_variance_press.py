"""The paper's minimum-variance proposals as a kvpress scorer."""

from dataclasses import dataclass
from typing import ClassVar

from kvpress import ScorerPress
from torch import Tensor, nn

from kvpress_prob.hf import LayerPrefill
from kvpress_prob.maths.arguments import check_flag, check_ratio
from kvpress_prob.maths.proposals import Prior, ScoresAre, min_variance_proposal
from kvpress_prob.ops.precision import without_autocast
from kvpress_prob.sources import PrefillRows


@dataclass
class MinVariancePress(ScorerPress):
    """
    Minimum-variance proposal: observed attention times the norm of the values.

    The score of an entry is its probability under ``pi_min`` (``prior="last"``) or ``pi_min-h`` (``prior="harmonic"``),
    per KV head. Used alone it is a top-k press; inside ``ProbabilisticPress`` it is the distribution that is sampled
    from.

    Works with any attention implementation: no attention matrix is needed.

    Based on A Probabilistic Interpretation of KV Cache Eviction (https://arxiv.org/abs/2608.28293), section 7.

    Parameters
    ----------
    compression_ratio : float, default=0.0
        Fraction of key-value pairs to remove when used as a top-k press.
    prior : {"last", "uniform", "harmonic"}, default="harmonic"
        Weights of the query rows: the newest only, all alike, or ``1 / (t - j + 1)``.
    centered : bool, default=True
        Use ``|v_i - o|``, the optimum of the self-normalised estimator, instead of ``|v_i|``, the paper's choice.
    max_rows : int, optional, default=None
        Read at most this many query rows: the newest, and a stratified sample of the older ones. None reads all.
    """

    scores_are: ClassVar[ScoresAre] = "weights"

    compression_ratio: float = 0.0
    prior: Prior = "harmonic"
    centered: bool = True
    max_rows: int | None = None

    def __post_init__(self):
        check_ratio(self.compression_ratio)
        check_flag("centered", self.centered)
        PrefillRows(self.prior, self.max_rows)

    @without_autocast
    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict,
    ) -> Tensor:
        layer = LayerPrefill(module, hidden_states, keys, values, attentions, kwargs)
        mass = PrefillRows(self.prior, self.max_rows).rows(layer).statistic("mean")
        return min_variance_proposal(mass, values, centered=self.centered)
