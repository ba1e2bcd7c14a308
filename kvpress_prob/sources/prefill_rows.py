"""The prefill's own query rows: they are there already and cost no pass of the model."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from kvpress_prob.hf import LayerPrefill
from kvpress_prob.maths.arguments import check_integer
from kvpress_prob.maths.proposals import PRIORS, Prior, row_prior
from kvpress_prob.maths.rows import sample_rows
from kvpress_prob.sources.query_rows import QueryRows


@dataclass(frozen=True)
class PrefillRows:
    """Query rows of the prefill, weighted by a prior (arXiv 2608.28293, section 7).

    Parameters
    ----------
    prior : {"last", "uniform", "harmonic"}, default="harmonic"
        Weights of the rows: the newest only, all alike, or ``1 / (t - j + 1)``.
    max_rows : int, optional, default=None
        Read at most this many rows: the newest, and a stratified sample of the older ones. None reads all.
    window : int, optional, default=None
        The prior is over this many newest rows; older ones do not count. None is all.
    """

    prior: Prior = "harmonic"
    max_rows: int | None = None
    window: int | None = None

    def __post_init__(self):
        if self.prior not in PRIORS:
            raise ValueError(f"prior must be one of {PRIORS}, got {self.prior!r}")
        for name, value in (("max_rows", self.max_rows), ("window", self.window)):
            check_integer(name, value, 1, optional=True)

    def rows(self, layer: LayerPrefill) -> QueryRows:
        """All rows are those of a prefill's ``t`` entries; fewer, the newest, when a kvpress press scores while
        decoding."""
        inputs, keys = layer.inputs, layer.keys
        b, t, n = keys.shape[0], keys.shape[2], inputs.query.shape[2]
        if layer.valid is None:
            rows, weights = _chosen(self, n, keys.device)
            weights = weights.expand(b, -1)
        else:
            rows, weights = self._choose(layer.valid[:, t - n :])
        bias = layer.column_bias
        return QueryRows(
            query=inputs.query if len(rows) == n else inputs.query[:, :, rows],
            keys=keys,
            values=layer.values,
            context=t,
            weights=weights,
            scaling=inputs.scaling,
            softcap=inputs.softcap,
            positions=rows + t - n,
            valid=layer.valid,
            column_bias=None if bias is None else bias.unsqueeze(1).expand(-1, inputs.query.shape[1], -1),
        )

    def _choose(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """Rows [r] and their weights [b r] of the rows that count, ``seen`` [b n]. Asks the device for their number."""
        n = seen.shape[1]
        if self.window is not None:
            seen = seen & (torch.arange(n, 0, -1, device=seen.device) <= self.window)
        weights = row_prior(self.prior, seen)
        if self.max_rows is not None and self.max_rows < n:
            return sample_rows(weights, self.max_rows)
        rows = weights.any(0).nonzero().squeeze(-1)
        return rows, weights[:, rows]


@lru_cache(maxsize=16)
def _chosen(source: PrefillRows, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows [r] and their weights [1 r] where nothing is padding: chosen on the host, once for all layers."""
    with torch.inference_mode(False):
        rows, weights = source._choose(torch.ones(1, n, dtype=torch.bool, device="cpu"))
        return rows.to(device), weights.to(device)
