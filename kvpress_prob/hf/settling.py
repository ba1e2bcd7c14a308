"""The end of a pass over a bounded cache: tokens join the pool, the pool is drawn from, every layer is packed again."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress_prob.hf.cache import RaggedLayer
from kvpress_prob.hf.pool import POSITION, SCORES, Pool
from kvpress_prob.hf.pool_draw import PoolState, drawn, log_weights
from kvpress_prob.hf.resampling import EXTRA, Resampler
from kvpress_prob.maths.draw import groups_of
from kvpress_prob.maths.random import uniforms


def boundaries(layer: RaggedLayer) -> list[int]:
    """Tokens of each row that belong into the pool now."""
    pool = pool_of(layer)
    settings, length = pool.settings, layer.get_seq_length()
    return [
        max(before, (length - padding - settings.n_recent) // settings.budget.interval * settings.budget.interval)
        for before, padding in zip(pool.boundary, layer.padding, strict=True)
    ]


def must_evict(layer: RaggedLayer) -> bool:
    """Whether ``settle`` may have to evict. Nothing is asked of the device."""
    pool, target = pool_of(layer), boundaries(layer)
    if target == pool.boundary:
        return False
    settings = pool.settings
    capacities = [settings.capacity(boundary) for boundary in target]
    return pool.evicted or any(
        capacity is not None and boundary - settings.n_sink > capacity
        for boundary, capacity in zip(target, capacities, strict=True)
    )


def left_of(layer: RaggedLayer) -> int:
    """Entries that a head of the first row keeps of those it holds, if all heads keep as many."""
    settings, boundary = pool_of(layer).settings, boundaries(layer)[0]
    whole = layer.get_seq_length() - layer.padding[0] - boundary
    return settings.n_sink + (settings.capacity(boundary) or 0) + whole


def pool_of(layer: RaggedLayer) -> Pool:
    if layer.pool is None:
        raise TypeError("a layer of a bounded cache must have a pool")
    return layer.pool


def settle(layers: Sequence[RaggedLayer], shares: Sequence[float], amounts: Sequence[Sequence[Tensor | None]]) -> bool:
    """Keep the layers of one cache to their budget; what is left has room for ``interval`` tokens.

    Parameters
    ----------
    layers : sequence of RaggedLayer
        All compressed layers, each with a pool.
    shares : sequence of float
        Share of the budget of each component.
    amounts : sequence of sequence of Float[Tensor, "n"] or None
        By layer and component: log amounts of the layer's ``store.entries()`` for a component whose scores change, inf
        for entries that are kept for certain; None for the others, whose scores are in the store.

    Returns
    -------
    bool
        Whether anything was evicted.
    """
    first = pool_of(layers[0])
    settings, target = first.settings, boundaries(layers[0])
    if target == first.boundary:
        return False
    if not must_evict(layers[0]):
        for layer in layers:
            pool_of(layer).boundary = target
        return False
    device = layers[0].store.log_w.device
    heads = [layer.store.kv_heads for layer in layers]
    offsets = [sum(heads[:index]) for index in range(len(heads))]
    gathered = [_gathered(*of_layer, device) for of_layer in zip(layers, amounts, offsets, strict=True)]
    places, flat = zip(*gathered, strict=True)
    row, position, head, scores, now, log_u = (torch.cat(parts, -1) for parts in zip(*flat, strict=True))
    layer_of_head = torch.repeat_interleave(torch.tensor(heads, device=device))
    group = groups_of(settings.draw.allocation, layer_of_head)
    kept = torch.ones_like(row, dtype=torch.bool)
    log_w = torch.zeros_like(log_u[0])
    for index, boundary in enumerate(target):
        mine = (row == index) & (position >= settings.n_sink) & (position < boundary)
        here = mine.nonzero().squeeze(-1)
        log_scale, log_tau = (
            torch.cat([getattr(pool_of(layer), name)[index].to(device) for layer in layers], -1)
            for name in ("log_scale", "log_tau")
        )
        state = PoolState(
            position[here], head[here], scores[:, here], now[:, here], log_u[:, here], log_scale, log_tau, group
        )
        kept[here] = drawn(state, settings, shares, first.boundary[index], boundary)
        log_w[here] = log_weights(state, settings)
        scores[:, here] = state.scores
        for layer, scale, tau in zip(
            layers, state.log_scale.split(heads, -1), state.log_tau.split(heads, -1), strict=True
        ):
            pool_of(layer).draw_was(index, boundary, scale, tau)
    evicted = not bool(kept.all())
    if evicted:
        sizes = [len(place) for place in places]
        parts = zip(kept.split(sizes), log_w.split(sizes), scores.split(sizes, -1), strict=True)
        for layer, place, part in zip(layers, places, parts, strict=True):
            _pack(layer, place, *part)
    return evicted


def set_limits(layers: Sequence[RaggedLayer]) -> None:
    """Say what each layer may hold once nobody watches: what it holds, and its part of what the budget leaves."""
    settings = pool_of(layers[0]).settings
    heads = sum(layer.store.kv_heads for layer in layers)
    for row in range(layers[0].store.batch):
        stored = [resampler_of(layer).held[row] + layer.appended * layer.store.kv_heads for layer in layers]
        spare = settings.budget.interval
        if settings.budget.max_entries is not None:
            spare = max(settings.budget.max_entries - -(-sum(stored) // heads), 0)
        for layer, count in zip(layers, stored, strict=True):
            resampler_of(layer).limit[row] = count + spare * layer.store.kv_heads


def resampler_of(layer: RaggedLayer) -> Resampler:
    if layer.resampler is None:
        raise TypeError("a layer of a bounded cache must have a resampler")
    return layer.resampler


def _gathered(
    layer: RaggedLayer, amounts: Sequence[Tensor | None], offset: int, device: torch.device
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Places of the layer's entries and what the draw reads of them."""
    store, pool = layer.store, pool_of(layer)
    place, segment = store.entries()
    row, head = segment // store.kv_heads, segment % store.kv_heads
    position = store.columns[POSITION][place].long()
    scores = store.columns[SCORES][place].double().T.contiguous()
    for component, changing in enumerate(pool.settings.changing):
        if not changing:
            scores[component] = _known(scores[component], segment, len(store.start))
    now = torch.stack([mine if part is None else part for mine, part in zip(scores, amounts, strict=True)])
    if pool.settings.top_k:
        log_u = torch.zeros_like(scores)
    else:
        component = torch.arange(len(scores), device=place.device).unsqueeze(-1)
        log_u = uniforms(pool.settings.seed, pool.layer, head, position, component).log()
    flat = (row, position, head + offset, scores, now, log_u)  # heads of all layers are counted through
    return place, tuple(part.to(device) for part in flat)


def _known(scores: Tensor, segment: Tensor, segments: int) -> Tensor:
    """Entries that came in without a score, outside the press' block, count as their head's average entry."""
    missing = scores.isnan()
    if not missing.any():
        return scores
    known = (~missing).double()
    total = torch.zeros(segments, dtype=torch.float64, device=scores.device).index_add(0, segment, scores.nan_to_num(0))
    number = torch.zeros_like(total).index_add(0, segment, known)
    return torch.where(missing, (total / number.clamp(min=1))[segment], scores)


def _pack(layer: RaggedLayer, place: Tensor, kept: Tensor, log_w: Tensor, scores: Tensor) -> None:
    """Evict in one layer; its dense copy is gone before the next layer's is made."""
    store, pool = layer.store, pool_of(layer)
    store.log_w[place] = log_w.to(place.device).float() + store.columns[EXTRA][place]
    store.columns[SCORES][place] = scores.T.to(place.device).float()
    layer.store = store.keep(kept.to(place.device), pool.settings.budget.interval)
    pool.evicted = True
    joined = max(pad + boundary for pad, boundary in zip(layer.padding, pool.boundary, strict=True))
    layer.become_context(max(joined, layer.context_length))  # answers are sampled again whole, beyond the pool
