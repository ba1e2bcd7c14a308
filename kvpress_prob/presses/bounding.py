"""What a press does at the end of every pass over a cache that is bounded at all times: score, draw, evict.

Scores that never change (a key's norm, a read-out of an entry's own hidden state) are computed once, when a token comes
in. Scores that do (what the newest queries attend to) are computed for everything that is held, whenever something has
to go: this package's from the newest queries and the weighted entries, others by their own rule over what is held.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from kvpress import KnormPress, ScorerPress
from torch import Tensor
from transformers import Cache

from kvpress_prob.hf import (
    AttentionInputs,
    LayerPrefill,
    PoolSettings,
    RaggedLayer,
    bytes_of,
    bytes_per_token,
    cache_bytes,
    settle,
)
from kvpress_prob.hf.pool import MIN_LOG_AMOUNT, SCORES, score_newest
from kvpress_prob.hf.settling import left_of, must_evict, set_limits
from kvpress_prob.maths.budget import ratio_of_entries
from kvpress_prob.maths.proposals import check_finite, log_proposal, take_all_stratum
from kvpress_prob.presses.bounded_settings import kept_for_certain, pool_settings, reads_rows
from kvpress_prob.presses.component import Component, shares_of
from kvpress_prob.presses.min_variance_press import MinVariancePress
from kvpress_prob.presses.report import CompressionReport


class BoundedBlock:
    """What the passes of one block share. Call it for the next one."""

    def __init__(self, press: Any):
        self.press = press
        self.certain = kept_for_certain(press)
        self.unreported: Callable[[], CompressionReport] | None = None

    def __call__(self) -> "Bounding":
        return Bounding(self)

    def end(self) -> None:
        """Bring the press' report up to date with tokens that came one by one."""
        if self.unreported is not None:
            self.press.report = self.unreported()


class Bounding:
    """State of one pass under a ``ProbabilisticPress`` with a budget (a ``PassWatcher``)."""

    def __init__(self, block: BoundedBlock):
        self.block, press = block, block.press
        self.press = press
        self.components: list[Component] = press.components
        self.amounts: list[list[Tensor | None]] = []

    def settings(self, known: PoolSettings | None) -> PoolSettings:
        return pool_settings(self.press, self.block.certain, known)

    def layer(self, layer: RaggedLayer, new: LayerPrefill) -> None:
        """Score the new tokens, and everything that is held where scores change and something has to go."""
        evicts = must_evict(layer)
        amounts: list[Tensor | None] = []
        for index, component in enumerate(self.components):
            part = None
            if component.rule.never_changes:
                score_newest(layer.store, index, _lasting(component, new))
                if isinstance(component.press, KnormPress):
                    _score_older(component, layer, index, new)
            elif evicts:
                part = self._amounts(component, layer, new)
            amounts.append(part)
        self.amounts.append(amounts)

    def end(self, model: Any, cache: Cache, layers: list[RaggedLayer], tokens: int) -> None:
        """Evict, and write the press' report."""
        shares = shares_of(self.components, self.press.compression_ratio)
        evicted = settle(layers, shares, self.amounts)
        if evicted or tokens > 1 or self.press.report is None:
            set_limits(layers)
            self.press.report, self.block.unreported = self._report(cache, layers), None
        else:
            self.block.unreported = partial(self._report, cache, layers)

    def _target(self, length: int) -> float:
        """The compression ratio that the budget is by now."""
        most = self.press.budget.max_entries
        return self.press.compression_ratio if most is None else max(0.0, 1 - most / max(length, 1))

    def _amounts(self, component: Component, layer: RaggedLayer, new: LayerPrefill) -> Tensor:
        """Log amounts [n] of everything that a layer holds, inf for what the scorer protects."""
        store = layer.store
        query = cast(Tensor, cast(Any, layer.resampler).queries)
        keys, values, log_w, valid = store.aligned()
        component.press.compression_ratio = ratio_of_entries(left_of(layer), keys.shape[1])
        n = new.hidden_states.shape[1]
        protected, scores_are = torch.zeros_like(valid), component.rule.scores_are
        if reads_rows(component.press):
            scores = _row_scores(component.press, new, query, keys, values, log_w, valid)
        elif new.keys.shape[2] > max(query.shape[2] - 1, getattr(component.press, "window_size", 0)):
            # Places without an entry repeat their head's first one.
            shape = (store.batch, store.kv_heads)
            scores = component.press.score(
                new.module,
                new.hidden_states,
                keys.unflatten(0, shape),
                values.unflatten(0, shape),
                cast(Any, None),
                new.kwargs,
            )
            if scores.shape[-1] != keys.shape[1]:
                raise TypeError(
                    f"{type(component.press).__name__} cannot score {keys.shape[1]} entries after {n} tokens"
                )
            scores = scores.flatten(0, 1)
            protected = _protected(component, scores, valid, store.batch)
        else:  # too few tokens for the scorer: what the most recent queries attend to, as after the block
            scores_are = "weights"
            scores = _row_scores(MinVariancePress(prior="uniform"), new, query, keys, values, log_w, valid)
        check_finite(f"scores of layer {cast(Any, new.module).layer_idx}", scores[valid])
        log_a = log_proposal(
            scores,
            valid & ~protected,
            scores_are,
            temperature=component.proposal_temperature,
            uniform_mix=self.press.uniform_mix,
        )
        return torch.where(protected, torch.inf, log_a.clamp(min=MIN_LOG_AMOUNT))[valid]

    def _report(self, cache: Cache, layers: list[RaggedLayer]) -> CompressionReport:
        press = self.press
        kept = torch.stack([layer.store.length.view(layer.store.batch, -1).cpu() for layer in layers])
        effective = torch.stack([_effective(layer).cpu() for layer in layers])
        length, pool = layers[0].get_seq_length(), cast(Any, layers[0].pool)
        dense = sum(length * len(layer.store.start) * _entry_bytes(layer) for layer in layers)
        return CompressionReport(
            target_ratio=self._target(length),
            context_lengths=[length - padding for padding in layers[0].padding],
            layers=[cast(Any, layer.pool).layer for layer in layers],
            kept=kept,
            effective=effective,
            draws=None,
            bytes_before=dense + bytes_of([it for it in cache.layers if not isinstance(it, RaggedLayer)]),
            bytes_after=cache_bytes(cache),
            bytes_per_token=bytes_per_token(cache),
            seed=pool.settings.seed,
            settings=f"{' + '.join(type(it.press).__name__ for it in self.components)}, {press.sampler}, "
            f"{press.correction}, {press.allocation}, bounded",
        )


def _entry_bytes(layer: RaggedLayer) -> int:
    return (layer.store.keys.shape[-1] + layer.store.values.shape[-1]) * layer.store.keys.element_size()


def _effective(layer: RaggedLayer) -> Tensor:
    """Kish's effective sample size [b hkv] of a layer's weights."""
    store = layer.store
    place, segment = store.entries()
    weight = store.log_w[place].double().exp()
    zero = weight.new_zeros(len(store.start))
    total, squares = zero.index_add(0, segment, weight), zero.index_add(0, segment, weight.square())
    return (total.square() / squares.clamp(min=1e-300)).view(store.batch, -1)


def _lasting(component: Component, new: LayerPrefill) -> Tensor:
    """Log amounts [b hkv n] of new tokens, float64, under a scorer whose scores never change."""
    scores = component.press.score(
        new.module, new.hidden_states, new.keys, new.values, cast(Any, new.attentions), new.kwargs
    )
    name = f"scores of layer {cast(Any, new.module).layer_idx}"
    check_finite(name, scores)
    if component.rule.scores_are in ("logits", "log_weights"):
        return scores.double() / component.proposal_temperature
    if (scores < 0).any():
        raise ValueError(f"{name} must be >= 0, got negative ones from {type(component.press).__name__}")
    return scores.double().log() / component.proposal_temperature


def _protected(component: Component, scores: Tensor, valid: Tensor, batch: int) -> Tensor:
    """What a scorer that does not know of weights and rounds protects of the entries [s t] that are held."""
    ends = component.rule.ends
    if ends is None:
        rows = scores.unflatten(0, (batch, -1))
        return torch.stack([take_all_stratum(row) for row in rows]).flatten(0, 1) & valid
    first, last = ends(component.press, scores.shape[1])
    age = torch.arange(scores.shape[1], 0, -1, device=scores.device)
    return valid & ((valid.cumsum(-1) <= first) | (age <= last) | (scores == torch.finfo(scores.dtype).max))


def _score_older(component: Component, layer: RaggedLayer, index: int, new: LayerPrefill) -> None:
    """A norm can be had of keys that came in before the block, too."""
    store = layer.store
    missing = store.columns[SCORES][:, index].isnan()
    scores = component.press.score(new.module, new.hidden_states, store.keys[None, None], store.values[None, None],
                                   cast(Any, None), {})  # fmt: skip
    amounts = (scores[0, 0].double() / component.proposal_temperature).float()
    store.columns[SCORES][:, index] = torch.where(missing, amounts, store.columns[SCORES][:, index])


def _row_scores(
    press: ScorerPress, new: LayerPrefill, query: Tensor, keys: Tensor, values: Tensor, log_w: Tensor, valid: Tensor
) -> Tensor:
    """Scores [s t] of every head's entries by the rows of the newest queries [b hq n d], each head as a batch row.

    The rows attend to weighted entries; a score is an entry's own, so its weight is divided out again.
    """
    n, inputs = query.shape[2], new.inputs
    rows = AttentionInputs(query.reshape(len(valid), -1, n, query.shape[-1]), inputs.scaling, inputs.softcap)
    kwargs = {"attention_inputs": rows, "valid": valid, "column_bias": log_w}
    hidden = query.new_empty(len(valid), n, 0)  # as many as there are rows
    scores = press.score(new.module, hidden, keys.unsqueeze(1), values.unsqueeze(1), cast(Any, None), kwargs)
    return torch.where(valid, scores.squeeze(1) * (-log_w).exp(), 0)
