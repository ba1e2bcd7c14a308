"""One compression: gather the layers' proposals, draw once for all of them, pack every layer.

The two halves are separate. ``layer`` gathers proposals while a prefill runs and changes nothing; ``pack`` draws from
them and evicts. One prefill can thus be packed several times, into copies of its cache, at different ratios and seeds.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from kvpress import ScorerPress
from torch import Tensor

from kvpress_prob.hf import LayerPrefill, Prefill, ResamplingSettings, Upcoming, cache_bytes, compress_layer
from kvpress_prob.maths.draw import Draw, Proposal, draw, groups_of
from kvpress_prob.maths.importance import effective_sample_size
from kvpress_prob.maths.random import streams
from kvpress_prob.presses.attention_press import AttentionPress
from kvpress_prob.presses.budget_check import budget_figures, budget_warning
from kvpress_prob.presses.component import Component, shares_of
from kvpress_prob.presses.report import CompressionReport
from kvpress_prob.presses.scoring import LayerScores, check_flags, log_weights, score_layer
from kvpress_prob.sources.query_rows import CheckedSource

if TYPE_CHECKING:
    from kvpress_prob.presses.probabilistic_press import ProbabilisticPress


class Compression:
    """State of one prefill under a ``ProbabilisticPress`` (a ``PrefillWatcher``)."""

    def __init__(self, press: ProbabilisticPress):
        self.press = press
        # Scores of every layer, by component; empty for one that needs the finished prefill.
        self.scores: list[list[LayerScores]] = [[] for _ in press.components]
        # From `complete` on: float64 log-weights [b hkv t] of every layer, by component, and the take-all stratum.
        self.log_weights: list[list[Tensor]] = []
        self.take_all: list[Tensor] = []
        self.padding: list[int] | None = None

    @property
    def components(self) -> list[Component]:
        return self.press.components

    def begin(self, upcoming: Upcoming) -> None:
        """Refuse what a component could not read once the model has run."""
        if self.press.compression_ratio == 0:
            return
        for component in self.components:
            source = getattr(component.press, "source", None)
            if isinstance(source, CheckedSource):
                source.check(upcoming)

    def layer(self, layer: LayerPrefill) -> None:
        """Score one layer."""
        if not self.press.evicts:
            return
        if self.padding is None:
            if self.press.entries_per_head is not None:
                self.press.prepare_scorers(self.press.ratio_of(layer.keys.shape[2]))
            self.padding = [0] * len(layer.keys) if layer.valid is None else (~layer.valid).sum(-1).tolist()
        for component, scores in zip(self.components, self.scores, strict=True):
            if not _needs_pass(component.press):
                scores.append(score_layer(component, layer, self.padding))

    def complete(self, prefill: Prefill) -> None:
        """Score what needs the finished prefill, and turn scores into proposal weights; call once before ``pack``.

        The prefill's cache is read and not changed.
        """
        if not self.press.evicts or not prefill.layers:
            return
        for index, component in enumerate(self.components):
            if _needs_pass(component.press):
                everything = cast(AttentionPress, component.press).score_context(prefill)
                self.scores[index] = [LayerScores(it, torch.zeros_like(it, dtype=torch.bool)) for it in everything]
        self.log_weights, flags = [[] for _ in self.components], [[] for _ in self.components]
        for scores in zip(*self.scores, strict=True):
            self._add_layer(scores, prefill.valid, flags)
        check_flags(self.components, prefill.layers, flags)
        self.scores = []

    def _add_layer(self, scores: tuple[LayerScores, ...], valid: Tensor, flags: list[list[Tensor]]) -> None:
        """Log-weights of one layer; what any component protects is in the take-all stratum of all."""
        press = self.press
        valid = valid.to(scores[0].scores.device)
        drawable = valid.unsqueeze(1).expand_as(scores[0].scores)
        certain = valid.cumsum(-1).unsqueeze(1) <= press.n_sink
        certain = certain | (torch.arange(valid.shape[1], 0, -1, device=valid.device) <= press.n_recent)
        for part in scores:
            certain = certain | part.protected
        take_all = certain & drawable
        for index, (component, part) in enumerate(zip(self.components, scores, strict=True)):
            log_a, wrong = log_weights(component, part.scores, drawable & ~take_all, press.uniform_mix)
            self.log_weights[index].append(log_a)
            flags[index].append(wrong)
        self.take_all.append(take_all)

    def end(self, prefill: Prefill) -> None:
        """Compress the prefill's own cache and write the press' report."""
        self.complete(prefill)
        self.press.report = self.pack(prefill, self.press.compression_ratio, self.press.seed)

    def pack(self, prefill: Prefill, compression_ratio: float, seed: int | None) -> CompressionReport:
        """Draw and evict: ``prefill.cache`` is compressed in place.

        Parameters
        ----------
        prefill : Prefill
            Its cache holds the context that the gathered proposals belong to, dense.
        compression_ratio : float
            In [0, 1); 0 leaves the cache as it is. A press with ``entries_per_head`` has its own for every batch row.
        seed : int or None
            None takes a fresh seed from the operating system.
        """
        seed = torch.Generator().seed() if seed is None else seed
        lengths = prefill.valid.sum(-1).tolist()
        before = cache_bytes(prefill.cache)
        ratios = [compression_ratio] * len(lengths)
        if self.press.entries_per_head is not None:
            ratios = [self.press.ratio_of(length) for length in lengths]
        if any(ratios) and not prefill.layers:
            name = type(prefill.model).__name__
            warnings.warn(f"every layer of {name} has a sliding window: nothing is evicted", stacklevel=2)
        if not any(ratios) or not prefill.layers:
            kept, effective, draws = _everything(prefill, lengths), None, None
            if self.press.decoding is not None:
                self._pack_everything(prefill, lengths, seed)
        else:
            rows, figures = [], []
            for row, (length, ratio) in enumerate(zip(lengths, ratios, strict=True)):
                # The streams know nothing of batch rows, so a row is drawn as it would be alone.
                drawn, counted = self._draw_row(row, length, ratio, seed)
                rows.append(drawn)
                figures.append(counted)
            self._warn(figures, lengths, ratios)
            self._pack_layers(prefill, rows, lengths, seed)
            kv_heads = self.take_all[0].shape[1]
            kept = _by_layer([row.kept.sum(-1) for row in rows], kv_heads)
            effective = _by_layer([effective_sample_size(row.log_w, row.kept) for row in rows], kv_heads)
            sizes = [row.draws for row in rows if row.draws is not None]
            draws = _by_layer(sizes, kv_heads) if sizes else None
        press = self.press
        scorers = " + ".join(type(component.press).__name__ for component in self.components)
        return CompressionReport(
            target_ratio=sum(ratio * length for ratio, length in zip(ratios, lengths, strict=True)) / sum(lengths),
            context_lengths=lengths,
            layers=prefill.layers,
            kept=kept,
            effective=kept.double() if effective is None else effective,
            draws=draws,
            bytes_before=before,
            bytes_after=cache_bytes(prefill.cache),
            seed=seed,
            settings=f"{scorers}, {press.sampler}, {press.correction}, {press.allocation}",
        )

    def _warn(self, figures: list[Tensor], lengths: list[int], ratios: list[float]) -> None:
        """One warning when what was asked for cannot be had."""
        groups = groups_of(self.press.allocation, self._layer_of_head())
        for counted, length, ratio in zip(torch.stack(figures).cpu(), lengths, ratios, strict=True):
            message = budget_warning(counted, groups, length, ratio)
            if message:
                warnings.warn(message, stacklevel=2)
                return

    def _layer_of_head(self) -> Tensor:
        return torch.arange(len(self.take_all)).repeat_interleave(self.take_all[0].shape[1])

    def _draw_row(self, row: int, length: int, compression_ratio: float, seed: int) -> tuple[Draw, Tensor]:
        """The draw of one batch row, without its padding, and its ``budget_figures``."""
        press = self.press
        device = self.take_all[0].device

        def heads(layers: list[Tensor]) -> Tensor:  # [layers*hkv length]
            return torch.cat([layer[row, :, -length:].to(device) for layer in layers])

        shares = shares_of(self.components, compression_ratio)
        proposals = [
            Proposal(heads(log_a), share, component.budget_weighting, logarithms=True)
            for component, log_a, share in zip(self.components, self.log_weights, shares, strict=True)
        ]
        take_all = heads(self.take_all)
        if compression_ratio == 0:
            # A row that fits its budget keeps what has no score above 0 too.
            take_all = torch.ones_like(take_all)
            nothing = torch.full_like(proposals[0].weights, -torch.inf)
            proposals = [replace(proposal, weights=nothing) for proposal in proposals]
        layers, kv_heads = len(self.take_all), self.take_all[0].shape[1]
        layer = torch.arange(layers, device=device).unsqueeze(-1).expand(-1, kv_heads).flatten()
        head = torch.arange(kv_heads, device=device).repeat(layers)
        drawn = draw(
            proposals,
            take_all,
            groups_of(press.allocation, layer),
            keep_fraction=1 - compression_ratio,
            sampler=press.sampler,
            correction=press.correction,
            temperature=press.temperature,
            stream=streams(seed, layer, head, 0),
            combine=press.combine,
            max_weight=press.max_weight,
            calibrated=press.calibrate,
        )
        return drawn, budget_figures(proposals, take_all, drawn)

    def _pack_layers(self, prefill: Prefill, rows: list[Draw], lengths: list[int], seed: int) -> None:
        """Pack layer after layer, so that at most one layer is held twice."""
        t = prefill.valid.shape[1]
        padding = [t - length for length in lengths]
        for index, layer in enumerate(prefill.layers):
            shape, device = self.take_all[index].shape, self.take_all[index].device
            heads = slice(index * shape[1], (index + 1) * shape[1])
            kept = torch.zeros(shape, dtype=torch.bool, device=device)
            log_w = torch.zeros(shape, device=device)
            for row, (pad, result) in enumerate(zip(padding, rows, strict=True)):
                kept[row, :, pad:] = result.kept[heads]
                log_w[row, :, pad:] = result.log_w[heads]
            compress_layer(prefill.cache, layer, kept, log_w, padding, self._resampling(layer, seed))

    def _pack_everything(self, prefill: Prefill, lengths: list[int], seed: int) -> None:
        """Nothing is evicted yet, but decoding has a budget."""
        padding = [prefill.valid.shape[1] - length for length in lengths]
        for layer in prefill.layers:
            keys = cast(Tensor, prefill.cache.layers[layer].keys)
            kept = prefill.valid.to(keys.device).unsqueeze(1).expand(keys.shape[:3])
            log_w = torch.zeros(keys.shape[:3], device=keys.device)
            compress_layer(prefill.cache, layer, kept, log_w, padding, self._resampling(layer, seed))

    def _resampling(self, layer: int, seed: int) -> ResamplingSettings | None:
        press = self.press
        if press.decoding is None:
            return None
        return ResamplingSettings(
            press.decoding,
            press.sampler,
            press.correction,
            press.temperature,
            press.uniform_mix,
            press.n_sink,
            seed,
            layer,
        )


def _needs_pass(press: ScorerPress) -> bool:
    return isinstance(press, AttentionPress) and press.needs_pass


def _by_layer(per_row: list[Tensor], kv_heads: int) -> Tensor:
    """Per-head figures of each batch row, [layers*hkv] each, as [layers b hkv] on the CPU."""
    return torch.stack(per_row, 1).unflatten(0, (-1, kv_heads)).transpose(1, 2).cpu()


def _everything(prefill: Prefill, lengths: list[int]) -> Tensor:
    """Kept entries [layers b hkv] when nothing is evicted."""
    heads = cast(Tensor, prefill.cache.layers[prefill.layers[0]].keys).shape[1] if prefill.layers else 0
    return torch.tensor(lengths).view(1, -1, 1).expand(len(prefill.layers), -1, heads)
