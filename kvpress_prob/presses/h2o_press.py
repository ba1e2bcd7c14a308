"""Accumulated attention as a kvpress scorer, without eager attention."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from kvpress import ScorerPress
from torch import Tensor, nn

from kvpress_prob.hf import LayerPrefill
from kvpress_prob.maths.arguments import check_flag, check_ratio
from kvpress_prob.maths.proposals import Prior, ScoresAre, accumulated_attention_proposal
from kvpress_prob.ops.precision import without_autocast
from kvpress_prob.sources import PrefillRows


@dataclass
class H2OPress(ScorerPress):
    """
    H2O: attention accumulated over the prefill's query rows.

    The score of an entry is its probability under ``pi_H2O`` (``prior="uniform"``) or ``pi_H2O-h``
    (``prior="harmonic"``), per KV head. With ``prior="uniform", average=True`` the scores are those of kvpress'
    ``ObservedAttentionPress`` up to a constant factor, for any attention implementation and without an attention
    matrix.

    Based on H2O (https://arxiv.org/abs/2306.14048) and A Probabilistic Interpretation of KV Cache Eviction
    (https://arxiv.org/abs/2608.28293), section 7.

    Parameters
    ----------
    compression_ratio : float, default=0.0
        Fraction of key-value pairs to remove when used as a top-k press.
    prior : {"last", "uniform", "harmonic"}, default="uniform"
        Weights of the query rows.
    average : bool, default=False
        Divide by the number of rows that see the entry, as ``ObservedAttentionPress`` does.
    max_rows : int, optional, default=None
        Read at most this many query rows: the newest, and a stratified sample of the older ones. None reads all.
    """

    scores_are: ClassVar[ScoresAre] = "weights"

    compression_ratio: float = 0.0
    prior: Prior = "uniform"
    average: bool = False
    max_rows: int | None = None

    def __post_init__(self):
        check_ratio(self.compression_ratio)
        check_flag("average", self.average)
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
        scores = accumulated_attention_proposal(mass, keys.shape[1])
        if self.average:
            rows = torch.arange(keys.shape[2], 0, -1, device=scores.device).clamp(max=hidden_states.shape[1])
            scores = scores / rows
        return scores
