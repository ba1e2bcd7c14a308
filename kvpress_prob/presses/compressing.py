"""Drawing from gathered proposals: one draw for all layers, then every layer is packed.

What was gathered from a prefill can be drawn from many times, into copies of its cache.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from kvpress_prob.hf import CacheBudget, Prefill, ResamplingSettings, bytes_per_token, cache_bytes, compress_layer
from kvpress_prob.maths.draw import Draw, DrawSettings, Proposal, draw, groups_of
from kvpress_prob.maths.importance import effective_sample_size
from kvpress_prob.maths.random import streams
from kvpress_prob.presses.budget_check import budget_figures, budget_warning
from kvpress_prob.presses.component import Component, shares_of
from kvpress_prob.presses.dropped_mass import dropped_mass
from kvpress_prob.presses.gathering import Gathered
from kvpress_prob.presses.report import CompressionReport


def compress(
    gathered: Gathered | None,
    prefill: Prefill,
    components: Sequence[Component],
    settings: DrawSettings,
    ratios: Sequence[float],
    seed: int | None,
    *,
    decoding: CacheBudget | None = None,
    n_sink: int = 0,
) -> CompressionReport:
    """Draw and evict: ``prefill.cache`` is compressed in place.

    Parameters
    ----------
    gathered : Gathered or None
        Proposals of this context; None, or nothing in it, leaves every entry.
    prefill : Prefill
        Its cache holds the context, dense.
    components : sequence of Component
        Whose proposals these are: their shares of the budget, and between which heads it is shared.
    settings : DrawSettings
    ratios : sequence of float
        Compression ratio of every batch row, in [0, 1). A cache is left as it is where all are 0.
    seed : int or None
        None takes a fresh seed from the operating system.
    decoding : CacheBudget, optional
        Bound while decoding.
    n_sink : int, default=0
        First entries that are kept while decoding.
    """
    seed = torch.Generator().seed() if seed is None else int(seed)
    lengths = prefill.valid.sum(-1).tolist()
    before = cache_bytes(prefill.cache)
    resampling = {
        layer: None if decoding is None else ResamplingSettings(decoding, settings, n_sink, seed, layer)
        for layer in prefill.layers
    }
    if any(ratios) and not prefill.layers:
        name = type(prefill.model).__name__
        warnings.warn(f"every layer of {name} has a sliding window: nothing is evicted", stacklevel=2)
    draws_numbers = any(ratios) and gathered is not None and bool(prefill.layers) and settings.sampler != "top_k"
    if not any(ratios) or gathered is None or not prefill.layers:
        kept, effective, draws, dropped = _everything(prefill, lengths), None, None, None
        if decoding is not None:
            _pack_everything(prefill, lengths, resampling)
    else:
        rows, figures = [], []
        for row, (length, ratio) in enumerate(zip(lengths, ratios, strict=True)):
            proposals, take_all = _row(gathered, components, row, length, ratio)
            rows.append(_draw(proposals, take_all, len(gathered.take_all), settings, 1 - ratio, seed))
            figures.append(budget_figures(proposals, take_all, rows[-1]))
        kv_heads = gathered.take_all[0].shape[1]
        groups = groups_of(
            settings.allocation, torch.arange(len(gathered.take_all), device="cpu").repeat_interleave(kv_heads)
        )
        _warn(figures, groups, lengths, ratios)
        kept = _by_layer([row.kept.sum(-1) for row in rows], kv_heads)
        _pack_layers(prefill, gathered.take_all, rows, kept, lengths, resampling)
        effective = _by_layer([effective_sample_size(row.log_w, row.kept) for row in rows], kv_heads)
        sizes = [row.draws for row in rows if row.draws is not None]
        draws = _by_layer(sizes, kv_heads) if sizes else None
        outside = (
            [dropped_mass(gathered.attention, it.kept, row) for row, it in enumerate(rows)]
            if gathered.attention
            else []
        )
        dropped = _by_layer(outside, kv_heads) if outside else None
    scorers = " + ".join(type(component.press).__name__ for component in components)
    return CompressionReport(
        target_ratio=float(sum(ratio * length for ratio, length in zip(ratios, lengths, strict=True)) / sum(lengths)),
        context_lengths=lengths,
        layers=prefill.layers,
        kept=kept,
        effective=kept.double() if effective is None else effective,
        draws=draws,
        bytes_before=before,
        bytes_after=cache_bytes(prefill.cache),
        bytes_per_token=bytes_per_token(prefill.cache),
        seed=seed if draws_numbers or decoding is not None else None,
        dropped_mass=dropped,
        settings=f"{scorers}, {settings.sampler}, {settings.correction}, {settings.allocation}",
    )


def _row(
    gathered: Gathered, components: Sequence[Component], row: int, length: int, ratio: float
) -> tuple[list[Proposal], Tensor]:
    """Proposals and take-all stratum [layers*hkv length] of one batch row, without its padding."""

    def heads(layers: list[Tensor]) -> Tensor:
        return torch.cat([layer[row, :, -length:].to(gathered.take_all[0].device) for layer in layers])

    shares = shares_of(components, ratio)
    proposals = [
        Proposal(heads(log_a), share, component.budget_weighting, logarithms=True)
        for component, log_a, share in zip(components, gathered.log_weights, shares, strict=True)
    ]
    take_all = heads(gathered.take_all)
    if ratio == 0:
        # A row that fits its budget keeps what has no score above 0 too.
        take_all = torch.ones_like(take_all)
        proposals = [replace(it, weights=torch.full_like(it.weights, -torch.inf)) for it in proposals]
    return proposals, take_all


def _draw(
    proposals: list[Proposal], take_all: Tensor, layers: int, settings: DrawSettings, keep_fraction: float, seed: int
) -> Draw:
    """The draw of one batch row."""
    kv_heads, device = len(take_all) // layers, take_all.device
    layer = torch.arange(layers, device=device).unsqueeze(-1).expand(-1, kv_heads).flatten()
    head = torch.arange(kv_heads, device=device).repeat(layers)
    return draw(
        proposals,
        take_all,
        groups_of(settings.allocation, layer),
        keep_fraction=keep_fraction,
        settings=settings,
        stream=streams(seed, layer, head, 0),
        groups={"global": 1, "layer": layers, "head": len(take_all)}[settings.allocation],
    )


def _warn(figures: list[Tensor], groups: Tensor, lengths: list[int], ratios: Sequence[float]) -> None:
    """One warning when what was asked for cannot be had."""
    for counted, length, ratio in zip(torch.stack(figures).cpu(), lengths, ratios, strict=True):
        message = budget_warning(counted, groups, length, ratio)
        if message:
            warnings.warn(message, stacklevel=2)
            return


def _pack_layers(
    prefill: Prefill,
    take_all: list[Tensor],
    rows: list[Draw],
    sizes: Tensor,
    lengths: list[int],
    resampling: dict[int, ResamplingSettings | None],
) -> None:
    """Pack layer after layer, so that at most one layer is held twice. ``sizes`` [layers b hkv] on the CPU are the
    numbers of kept entries."""
    padding = [prefill.valid.shape[1] - length for length in lengths]
    for index, layer in enumerate(prefill.layers):
        shape, device = take_all[index].shape, take_all[index].device
        heads = slice(index * shape[1], (index + 1) * shape[1])
        kept = torch.zeros(shape, dtype=torch.bool, device=device)
        log_w = torch.zeros(shape, dtype=torch.float32, device=device)
        for row, (pad, result) in enumerate(zip(padding, rows, strict=True)):
            kept[row, :, pad:] = result.kept[heads]
            log_w[row, :, pad:] = result.log_w[heads]
        stored = sizes[index].flatten().tolist()
        compress_layer(prefill.cache, layer, kept, log_w, padding, resampling[layer], stored)


def _pack_everything(prefill: Prefill, lengths: list[int], resampling: dict[int, ResamplingSettings | None]) -> None:
    """Nothing is evicted yet, but decoding has a budget."""
    padding = [prefill.valid.shape[1] - length for length in lengths]
    for layer in prefill.layers:
        keys = cast(Tensor, prefill.cache.layers[layer].keys)
        kept = prefill.valid.to(keys.device).unsqueeze(1).expand(keys.shape[:3])
        log_w = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        stored = [length for length in lengths for _ in range(keys.shape[1])]
        compress_layer(prefill.cache, layer, kept, log_w, padding, resampling[layer], stored)


def _by_layer(per_row: list[Tensor], kv_heads: int) -> Tensor:
    """Per-head figures of each batch row, [layers*hkv] each, as [layers b hkv] on the CPU."""
    return torch.stack(per_row, 1).unflatten(0, (-1, kv_heads)).transpose(1, 2).cpu()


def _everything(prefill: Prefill, lengths: list[int]) -> Tensor:
    """Kept entries [layers b hkv] when nothing is evicted."""
    heads = cast(Tensor, prefill.cache.layers[prefill.layers[0]].keys).shape[1] if prefill.layers else 0
    return torch.tensor(lengths, device="cpu").view(1, -1, 1).expand(len(prefill.layers), -1, heads)
