"""What a press does at the end of every pass over a cache that is bounded at all times: score, draw, evict.

Scores that never change (a key's norm, a read-out of an entry's own hidden state) are computed once, when a token comes
in. Scores that do (what the newest queries attend to) are computed for everything that is held, whenever something has
to go: this package's from the newest queries and the weighted entries, others by their own rule over what is held.
"""

from dataclasses import replace
from typing import Any, cast

import torch
from kvpress import KnormPress, ScorerPress
from torch import Tensor
from transformers import Cache

from kvpress_prob.hf import (
    AttentionInputs,
    CacheBudget,
    LayerPrefill,
    PoolSettings,
    RaggedLayer,
    bytes_per_token,
    cache_bytes,
    settle,
)
from kvpress_prob.hf.pool import MIN_LOG_AMOUNT, SCORES, score_newest
from kvpress_prob.hf.settling import must_evict, set_limits
from kvpress_prob.maths.proposals import check_finite, log_proposal, take_all_stratum
from kvpress_prob.presses.attention_press import AttentionPress
from kvpress_prob.presses.component import Component, shares_of
from kvpress_prob.presses.h2o_press import H2OPress
from kvpress_prob.presses.kvpress_scorers import score_rule
from kvpress_prob.presses.min_variance_press import MinVariancePress
from kvpress_prob.presses.report import CompressionReport
from kvpress_prob.sources import PassSource, PrefillRows


def _reads_rows(press: ScorerPress) -> bool:
    """Scorers of this package that read query rows of whatever entries they are given."""
    if isinstance(press, AttentionPress):
        return isinstance(press.source, PrefillRows) and press.heads == "group"
    return isinstance(press, MinVariancePress | H2OPress)


def check_budget(press: Any) -> None:
    """Raise ``ValueError`` for parameters of a ``ProbabilisticPress`` that a bounded cache has no use for."""
    budget: CacheBudget = press.budget
    certain = budget.interval + budget.room + max(budget.queries, press.n_recent) + press.n_sink
    if budget.max_entries is not None and budget.max_entries <= certain:
        raise ValueError(
            f"budget.max_entries must be more than interval + room + the larger of queries and n_recent + n_sink = "
            f"{certain}, got {budget.max_entries}"
        )
    if budget.start == "decoding":
        return
    if press.measure_dropped_mass:
        raise ValueError("measure_dropped_mass must be False with a budget: the dense cache is never there")
    if press.entries_per_head is not None:
        raise ValueError(f"entries_per_head must be None with a budget's max_entries, got {press.entries_per_head}")
    if budget.max_entries is None and not press.compression_ratio:
        raise ValueError("budget must have max_entries, or the press a compression_ratio > 0, got neither")
    if press.sampler == "multinomial":
        raise ValueError("sampler must be 'systematic' (drawn by priority) or 'top_k' with a budget, got 'multinomial'")
    lasting = all(component.rule.never_changes for component in press.components)
    if lasting and not press.compression_ratio and any(callable(component.share) for component in press.components):
        raise ValueError(
            "compression_ratio must be given with a budget, scores that never change and a share that depends on it: "
            "shares are fixed when the budget is first exceeded"
        )
    for component in press.components:
        scorer = component.press
        if isinstance(scorer, AttentionPress) and isinstance(scorer.source, PassSource):
            raise ValueError(
                f"{type(scorer.source).__name__} needs the finished prefill, which a bounded cache never holds: use "
                "SurrogatePress, which predicts its scores, or a scorer that reads the prefill's own rows"
            )
        if press.uniform_mix and score_rule(scorer).never_changes:
            raise ValueError(
                f"uniform_mix must be 0 with a budget and scores that never change ({type(scorer).__name__}), "
                f"got {press.uniform_mix}"
            )


class Bounding:
    """State of one pass under a ``ProbabilisticPress`` with a budget (a ``PassWatcher``)."""

    def __init__(self, press: Any):
        self.press = press
        self.components: list[Component] = press.components
        self.amounts: list[list[Tensor | None]] = []

    def settings(self, known: PoolSettings | None) -> PoolSettings:
        press, budget = self.press, self.press.budget
        seed = torch.Generator().seed() if press.seed is None else press.seed
        settings = PoolSettings(
            budget=replace(budget, chunk_size=None, progress=False),
            draw=press.draw_settings,
            compression_ratio=press.compression_ratio,
            n_sink=press.n_sink,
            n_recent=max(press.n_recent, budget.queries),
            changing=tuple(not component.rule.never_changes for component in self.components),
            uniform=tuple(component.budget_weighting == "uniform" for component in self.components),
            seed=int(seed) % 2**64 if known is None else known.seed,
        )
        if known is not None and settings != known:
            raise ValueError(f"past_key_values is bounded by another budget or press: it has {known}, got {settings}")
        return settings

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
        length = layers[0].get_seq_length()
        shares = shares_of(self.components, self._ratio(length))
        evicted = settle(layers, shares, self.amounts)
        if evicted or tokens > 1 or self.press.report is None:
            set_limits(layers)
            self.press.report = self._report(cache, layers)

    def _ratio(self, length: int) -> float:
        """The compression ratio that shares are asked for: the press' own, or what the budget is by now."""
        budget = self.press.budget
        if self.press.compression_ratio or budget.max_entries is None:
            return self.press.compression_ratio
        return max(0.0, 1 - budget.max_entries / max(length, 1))

    def _amounts(self, component: Component, layer: RaggedLayer, new: LayerPrefill) -> Tensor:
        """Log amounts [n] of everything that a layer holds, inf for what the scorer protects."""
        store = layer.store
        query = cast(Tensor, cast(Any, layer.resampler).queries)
        keys, values, log_w, valid = store.aligned()
        n = new.hidden_states.shape[1]
        protected, scores_are = torch.zeros_like(valid), component.rule.scores_are
        if _reads_rows(component.press):
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
        after = cache_bytes(cache)
        dense = sum(layer.get_seq_length() * layer.store.batch * layer.store.kv_heads * _entry_bytes(layer)
                    for layer in layers)  # fmt: skip
        return CompressionReport(
            target_ratio=self._ratio(length),
            context_lengths=[length - padding for padding in layers[0].padding],
            layers=[cast(Any, layer.pool).layer for layer in layers],
            kept=kept,
            effective=effective,
            draws=None,
            bytes_before=dense
            + after
            - sum(sum(t.untyped_storage().nbytes() for t in layer.store.tensors) for layer in layers),
            bytes_after=after,
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
