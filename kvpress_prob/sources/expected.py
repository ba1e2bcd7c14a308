r"""Expected queries: a Gaussian over the queries that are still to come, in closed form and without a pass.

Queries before the rotary embedding are taken to be ``N(mu, S)`` with the prefill's mean and covariance; the rotation of
the coming positions is averaged to one matrix ``R``. A query ``q ~ N(R mu, R S R^T)`` attends to entry ``i`` in
proportion to

    E exp(s q.k_i) = exp(s R mu.k_i + s^2 k_i^T R S R^T k_i / 2)

which is one row with a bias per entry (Expected Attention, https://arxiv.org/abs/2510.00636).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpress_prob.hf import LayerPrefill
from kvpress_prob.hf.rotary import RotaryState, rotate
from kvpress_prob.maths.arguments import check_integer
from kvpress_prob.sources.query_rows import QueryRows


@dataclass(frozen=True)
class ExpectedQueries:
    """One expected query row of the coming positions. A model's softcap is left out.

    Parameters
    ----------
    n_future_positions : int, default=512
        Coming positions that the rotary embedding is averaged over.
    n_sink : int, default=4
        First entries that are left out of the query statistics and get no attention; keep them with the press' own
        ``n_sink``.
    max_rows : int, optional, default=512
        Query rows of the prefill, evenly spread, that mean and covariance are taken over. None takes all.
    """

    n_future_positions: int = 512
    n_sink: int = 4
    max_rows: int | None = 512

    def __post_init__(self):
        for name, value, least in (
            ("n_future_positions", self.n_future_positions, 1),
            ("n_sink", self.n_sink, 0),
            ("max_rows", 1 if self.max_rows is None else self.max_rows, 1),
        ):
            check_integer(name, value, least)

    def rows(self, layer: LayerPrefill) -> QueryRows:
        inputs, keys = layer.inputs, layer.keys
        b, t = keys.shape[0], keys.shape[2]
        if layer.valid is not None:
            raise NotImplementedError("expected queries of a padded batch: compress one context at a time")
        if t <= self.n_sink:
            raise ValueError(f"the context must have more than n_sink={self.n_sink} tokens, got {t}")
        count = min(t - self.n_sink, t if self.max_rows is None else self.max_rows)
        rows = torch.linspace(self.n_sink, t - 1, count, dtype=torch.float64, device=keys.device).round().long()
        query = _rotated_back(layer, inputs.query[:, :, rows].float(), rows)
        mean = query.mean(2, keepdim=True)
        centred = query - mean
        covariance = centred.mT @ centred / len(rows)  # [b hq d d]
        mean = self._rotated_on(layer, mean, t)
        covariance = self._rotated_on(layer, self._rotated_on(layer, covariance, t).mT, t)
        grouped = keys.float().unsqueeze(2)  # [b hkv 1 t d]
        covariance = covariance.unflatten(1, (keys.shape[1], -1))
        bias = ((grouped @ covariance) * grouped).sum(-1).flatten(1, 2) * (inputs.scaling**2 / 2)
        return QueryRows(
            query=mean.to(inputs.query.dtype),
            keys=keys,
            values=layer.values,
            context=t,
            weights=torch.ones(b, 1, dtype=torch.float64, device=keys.device),
            scaling=inputs.scaling,
            scope=torch.arange(t, device=keys.device) >= self.n_sink,
            column_bias=bias,
        )

    def _rotated_on(self, layer: LayerPrefill, x: Tensor, t: int) -> Tensor:
        """Apply the average rotation of the ``n_future_positions`` after the context to the last axis of x."""
        if not _rotates(layer):
            return x
        module: Any = layer.module
        given = layer.kwargs.get("position_ids")
        positions = torch.arange(self.n_future_positions, device=x.device).unsqueeze(0)
        positions = positions + (t if given is None else given[..., -1].amax().to(x.device) + 1)
        with RotaryState.of(module.rotary_emb).held():
            cos, sin = module.rotary_emb(x, positions)
        return _rotate(layer, x, cos.mean(1, keepdim=True), sin.mean(1, keepdim=True))


def _rotated_back(layer: LayerPrefill, query: Tensor, rows: Tensor) -> Tensor:
    """Queries before the rotary embedding."""
    if not _rotates(layer):
        return query
    cos, sin = (part[:, rows] for part in layer.kwargs["position_embeddings"])
    # Rotations that stretch (YaRN) do so by the square root of cos^2 + sin^2, the same everywhere.
    stretch = cos[..., :1].square() + sin[..., :1].square()
    return _rotate(layer, query, cos / stretch, -sin / stretch)


def _rotate(layer: LayerPrefill, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rotate(layer.module, x, cos.to(x.dtype), sin.to(x.dtype))


def _rotates(layer: LayerPrefill) -> bool:
    """False for layers without rotary embedding, as some of SmolLM3's."""
    return layer.kwargs.get("position_embeddings") is not None and bool(getattr(layer.module, "use_rope", True))
