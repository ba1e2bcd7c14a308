"""The prefill's own query rows: they are there already and cost no pass of the model."""

from dataclasses import dataclass

import torch

from kvpress_prob.hf import LayerPrefill
from kvpress_prob.maths.proposals import Prior, row_prior
from kvpress_prob.maths.rows import sample_rows
from kvpress_prob.sources.rows import QueryRows


@dataclass(frozen=True)
class PrefillRows:
    """Query rows of the prefill, weighted by a prior (arXiv 2608.28293, section 7).

    Parameters
    ----------
    prior : {"last", "uniform", "harmonic"}, default="harmonic"
        Weights of the rows: the newest only, all alike, or ``1 / (t - j + 1)``.
    max_rows : int, optional, default=None
        Read at most this many rows: the newest, and a stratified sample of the older ones. None reads all.
    """

    prior: Prior = "harmonic"
    max_rows: int | None = None

    def rows(self, layer: LayerPrefill) -> QueryRows:
        inputs, keys = layer.inputs, layer.keys
        b, t = keys.shape[0], keys.shape[2]
        valid = layer.valid
        weights = row_prior(
            self.prior, torch.ones(b, t, dtype=torch.bool, device=keys.device) if valid is None else valid
        )
        if self.max_rows is not None and self.max_rows < t:
            rows, weights = sample_rows(weights, self.max_rows)
        else:
            rows = weights.any(0).nonzero().squeeze(-1)
            weights = weights[:, rows]
        return QueryRows(
            query=inputs.query if len(rows) == t else inputs.query[:, :, rows],
            keys=keys,
            values=layer.values,
            context=t,
            weights=weights,
            scaling=inputs.scaling,
            softcap=inputs.softcap,
            positions=rows,
            valid=valid,
        )
