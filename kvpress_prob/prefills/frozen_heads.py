"""Diagnostics of frozen attention heads: how much of a head's error a better kept set of its size could still remove.

Some query rows of every head of one dense prefill are taken as they are (``maths.forced_weights`` has the quantities),
each with the keys that it sees. A row's output is computed again in float64 and held against the model's own: what is
diagnosed is the model's attention, or nothing.
"""

import math
from typing import Any, cast

import pandas as pd
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvpress_prob.hf import LayerPrefill, full_attention_layers
from kvpress_prob.maths import forced_weights as forced
from kvpress_prob.maths.budget import solve_inclusion
from kvpress_prob.maths.forced_weights import EXTRA, AttentionRows
from kvpress_prob.maths.sampling import systematic_sample
from kvpress_prob.prefills.shared_prefill import SharedPrefill

TOLERANCE = 4e-3
"""Largest difference of a coordinate of a row's output from the model's own."""
PROPOSALS = ("mass", "deviation")
"""What a weighted sample is drawn in proportion to: ``p``, or ``p |v - mu|``, the least-variance choice for a row."""
ROWS_AT_A_TIME = 2048


class _Outputs:
    """What every attention module hands to its output projection, at some positions."""

    def __init__(self, positions: dict[nn.Module, Tensor]):
        self.positions = positions
        self.rows: dict[nn.Module, Tensor] = {}

    def keep(self, module: nn.Module, projected: Tensor) -> None:
        self.rows[module] = projected[0, self.positions[module].to(projected.device)]


def diagnose_heads(
    model: PreTrainedModel,
    context_ids: Tensor,
    *,
    rows: int = 6,
    budgets: tuple[int, ...] = tuple(EXTRA),
    draws: int = 16,
    seed: int = 0,
) -> pd.DataFrame:
    """One line a sampled row of a query head and budget.

    Parameters
    ----------
    model : PreTrainedModel
    context_ids : Int[Tensor, "1 t"]
    rows : int
        Sampled rows of every layer, the same for its heads; each sees at least as many keys as the largest pool has.
    budgets : tuple of int
        Kept keys ``s``, among those with a pool size.
    draws : int
        Samples that the weighted estimator's error is averaged over.
    seed : int
        Of rows and samples.

    Returns
    -------
    DataFrame
        Columns layer, head, position, s; ``dropped`` (mass), ``phi``; errors ``top``, ``best`` (``ES_pool``),
        ``balanced`` (with ``swaps``), ``free``, ``vote`` and ``weighted_PROPOSAL``; ``kappa`` and ``closable``.

    Raises
    ------
    ValueError
        For a number outside its range, a context that is too short, or a model without full-attention layers.
    TypeError
        If an attention module has no ``o_proj``.
    RuntimeError
        If a row's output is not the model's own within ``TOLERANCE``.
    """
    check_rows(rows, budgets, draws)
    t, least = context_ids.shape[1], max(s + EXTRA[s] for s in budgets)
    if t < least + rows:
        raise ValueError(f"context must have at least {least + rows} tokens for these budgets, got {t}")
    generator = torch.Generator().manual_seed(seed)
    shared, outputs = _prefill(model, context_ids, rows, least - 1, generator)
    parts: list[pd.DataFrame] = []
    pools: dict[int, list[AttentionRows]] = {s: [] for s in budgets}
    for layer in shared.layers:
        masses = _masses(layer, outputs.positions[layer.module])
        _check_outputs(layer, masses, outputs.rows[layer.module])
        heads, queries, _ = masses.shape
        group = heads // layer.values.shape[1]
        for kv_head, values in enumerate(layer.values[0]):
            mine = masses[kv_head * group : (kv_head + 1) * group]
            of_head = forced.attention_rows(mine.flatten(0, 1), values)
            index = {
                "layer": cast(int, layer.module.layer_idx),
                "head": torch.arange(kv_head * group, (kv_head + 1) * group).repeat_interleave(queries).numpy(),
                "position": outputs.positions[layer.module].repeat(group).numpy(),
            }
            for s in budgets:
                measured, pool = _measure(of_head, s, queries, draws, generator)
                parts.append(pd.DataFrame({**index, "s": s, **measured}))
                pools[s].append(pool)
    table = pd.concat(parts).sort_values("s", kind="stable").reset_index(drop=True)
    searched = [_search(pools[s], s) for s in sorted(budgets)]
    table = pd.concat([table, pd.concat(searched, ignore_index=True)], axis=1)
    top, best = (torch.tensor(table[name].to_numpy()) for name in ("top", "best"))
    return table.assign(kappa=forced.gap_ratio(top, best).numpy(), closable=forced.closable_share(top, best).numpy())


def check_rows(rows: int, budgets: tuple[int, ...], draws: int) -> None:
    """Raise ``ValueError`` for numbers that ``diagnose_heads`` cannot use."""
    for name, value in (("rows", rows), ("draws", draws)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if not budgets or not set(budgets) <= set(EXTRA) or len(set(budgets)) < len(budgets):
        raise ValueError(f"budgets must be different ones among {list(EXTRA)}, got {list(budgets)}")


def _prefill(
    model: PreTrainedModel, context_ids: Tensor, rows: int, first: int, generator: torch.Generator
) -> tuple[SharedPrefill, _Outputs]:
    """The dense prefill, and the attention outputs at ``rows`` positions from ``first`` on of every layer."""
    modules = [module for module in model.modules() if hasattr(module, "q_proj") or hasattr(module, "qkv_proj")]
    without = [type(module).__name__ for module in modules if not hasattr(module, "o_proj")]
    if without or not modules:
        raise TypeError(f"model must have attention modules with an o_proj, got {without or type(model).__name__}")
    if not full_attention_layers(model):
        raise ValueError(f"model must have layers with full attention, got {type(model).__name__} with none")
    t = context_ids.shape[1]
    positions = {
        module: (first + torch.randperm(t - first, generator=generator)[:rows]).sort().values for module in modules
    }
    outputs = _Outputs(positions)
    handles = [
        cast(Any, module).o_proj.register_forward_pre_hook(
            lambda projection, args, module=module: outputs.keep(module, args[0])
        )
        for module in modules
    ]
    try:
        return SharedPrefill.run(model, context_ids), outputs
    finally:
        for handle in handles:
            handle.remove()


def _masses(layer: LayerPrefill, positions: Tensor) -> Tensor:
    """Attention [hq, rows, t] of the rows at some positions, float64; 0 for keys after them."""
    inputs = layer.inputs
    query = inputs.query[0, :, positions].double()
    keys = layer.keys[0].double().repeat_interleave(query.shape[0] // layer.keys.shape[1], 0)
    logits = query @ keys.mT * inputs.scaling
    if inputs.softcap is not None:
        logits = inputs.softcap * (logits / inputs.softcap).tanh()
    later = torch.arange(keys.shape[1], device=keys.device) > positions.to(keys.device).unsqueeze(-1)
    return logits.masked_fill(later, -math.inf).softmax(-1)


def _check_outputs(layer: LayerPrefill, masses: Tensor, own: Tensor) -> None:
    values = layer.values[0].double().repeat_interleave(masses.shape[0] // layer.values.shape[1], 0)
    output = (masses @ values).transpose(0, 1)
    apart = float((output - own.view(output.shape)).abs().max())
    if not apart <= TOLERANCE:
        raise RuntimeError(
            f"layer {layer.module.layer_idx}: attention computed from recorded queries and keys must give the model's "
            f"own output within {TOLERANCE}, got a difference of {apart:.3g}: load the model in float32, or this "
            "architecture's attention is not softmax over all earlier keys"
        )


def _measure(
    rows: AttentionRows, s: int, queries: int, draws: int, generator: torch.Generator
) -> tuple[dict[str, Any], AttentionRows]:
    """What needs all keys of a row, and the row's candidate pool."""
    top = forced.top_mass(rows.masses, s)
    # Row r of a group is query r % queries of its query head r // queries.
    voted = torch.stack([forced.group_vote(rows.masses[query::queries], s) for query in range(queries)])
    votes = voted.repeat(len(rows.masses) // queries, 1)
    found = {
        "dropped": forced.dropped_mass(rows.masses, top),
        "phi": forced.deviation_norm(rows, top),
        "top": forced.forced_error(rows, top),
        "vote": forced.forced_error(rows, votes),
        "free": forced.free_weight_error(rows, s),
    }
    for name, weights in zip(PROPOSALS, (rows.masses, rows.deviations.norm(dim=-1)), strict=True):
        found[f"weighted_{name}"] = _weighted(rows, weights, s, draws, generator)
    measured = {name: value.cpu().numpy() for name, value in found.items()}
    pool = rows.at(forced.candidate_pool(rows, s, EXTRA[s]))
    return measured, pool


def _weighted(rows: AttentionRows, weights: Tensor, s: int, draws: int, generator: torch.Generator) -> Tensor:
    """Mean error of weighted samples of ``s`` keys, drawn systematically in proportion to ``weights``."""
    count, device = len(weights), weights.device
    each = torch.arange(count, device=device)
    q = solve_inclusion(weights, each, torch.full((count,), float(s), device=device).double(), torch.ones_like(each))
    offset = torch.rand(draws, count, generator=generator, dtype=torch.float64).to(device)
    kept = systematic_sample(q.repeat(draws, 1), offset.flatten()).view(draws, count, -1)
    return forced.weighted_error(rows, q, kept).mean(0)


def _search(pools: list[AttentionRows], s: int) -> pd.DataFrame:
    """Best subset and balancing selector of all rows of a budget."""
    parts = []
    whole = AttentionRows(*(torch.cat([getattr(pool, name) for pool in pools]) for name in vars(pools[0])))
    for begin in range(0, len(whole.masses), ROWS_AT_A_TIME):
        chunk = AttentionRows(*(getattr(whole, name)[begin : begin + ROWS_AT_A_TIME] for name in vars(whole)))
        best, _ = forced.best_subset(chunk, s)
        balanced, _, swaps = forced.balance(chunk, s)
        found = {"best": torch.minimum(best, balanced), "balanced": balanced, "swaps": swaps}
        parts.append(pd.DataFrame({name: value.cpu().numpy() for name, value in found.items()}))
    return pd.concat(parts, ignore_index=True)
