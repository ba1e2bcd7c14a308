"""Accumulated attention as a kvpress scorer, without eager attention."""

from dataclasses import dataclass

import torch
from kvpress import ScorerPress
from torch import Tensor, nn

from kvpress_prob.maths.proposals import Prior, accumulated_attention_proposal
from kvpress_prob.presses.observed import check_observation, observed_mass


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

    compression_ratio: float = 0.0
    prior: Prior = "uniform"
    average: bool = False
    max_rows: int | None = None

    def __post_init__(self):
        check_observation(self.compression_ratio, self.prior, self.max_rows)

    def score(
        self,
        module: nn.Module,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict,
    ) -> Tensor:
        mass = observed_mass(module, hidden_states, keys, kwargs, self.prior, self.max_rows)
        scores = accumulated_attention_proposal(mass, keys.shape[1])
        if self.average:
            rows = torch.arange(keys.shape[2], 0, -1, device=scores.device).clamp(max=hidden_states.shape[1])
            scores = scores / rows
        return scores
