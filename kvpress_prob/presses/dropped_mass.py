"""How much of the newest rows' attention falls on entries that were evicted: a diagnostic, not an allocator.

The text on forced weights (docs/papers.md) finds that this mass tells where keeping other entries could still help, and
that moving budget towards it raises the error.
"""

import torch
from torch import Tensor

from kvpress_prob.hf import LayerPrefill
from kvpress_prob.ops.attention_mass import attention_mass
from kvpress_prob.sources.prefill_rows import PrefillRows

NEWEST = PrefillRows(prior="uniform", window=32)
"""Whose attention is measured."""


def newest_attention(layer: LayerPrefill) -> Tensor:
    """Attention [b hkv t] that entries receive, mean over the newest 32 rows and the query heads of a group."""
    rows = NEWEST.rows(layer)
    mass, _ = attention_mass(
        rows.query, rows.keys, rows.weights, scaling=rows.scaling, softcap=rows.softcap, positions=rows.positions,
        valid=rows.valid,
    )  # fmt: skip
    return mass.unflatten(1, (rows.keys.shape[1], -1)).mean(2)


def dropped_mass(attention: list[Tensor], kept: Tensor, row: int) -> Tensor:
    """Mass outside the kept entries of one batch row.

    Parameters
    ----------
    attention : list of Float[Tensor, "b hkv t"]
        ``newest_attention`` of every layer.
    kept : Bool[Tensor, "h length"]
        Kept entries of all layers' heads, without padding.
    row : int

    Returns
    -------
    Float64[Tensor, "h"]
    """
    of_row = torch.cat([layer[row, :, -kept.shape[1] :].to(kept.device) for layer in attention]).double()
    return torch.where(kept, 0, of_row).sum(-1)
