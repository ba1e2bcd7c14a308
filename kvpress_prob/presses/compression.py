"""One compression: gather the layers' proposals, draw once for all of them, pack every layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from kvpress_prob.hf import LayerPrefill, Prefill, cache_bytes, compress_layer
from kvpress_prob.maths.draw import Draw, draw, groups_of
from kvpress_prob.maths.importance import effective_sample_size
from kvpress_prob.maths.proposals import proposal_weights, take_all_stratum
from kvpress_prob.presses.report import CompressionReport

if TYPE_CHECKING:
    from kvpress_prob.presses.probabilistic_press import ProbabilisticPress


class Compression:
    """State of one prefill under a ``ProbabilisticPress`` (a ``PrefillWatcher``)."""

    def __init__(self, press: ProbabilisticPress):
        self.press = press
        self.weights: list[Tensor] = []  # float64 [b hkv t] per layer
        self.take_all: list[Tensor] = []  # bool [b hkv t] per layer

    def layer(self, layer: LayerPrefill) -> None:
        """Score one layer and turn the scores into proposal weights."""
        press = self.press
        if press.compression_ratio == 0:
            return
        scores = press.press.score(
            layer.module,
            layer.hidden_states,
            layer.keys,
            layer.values,
            layer.attentions,  # pyright: ignore[reportArgumentType]  (None unless eager, as kvpress documents)
            layer.kwargs,
        )
        name = f"scores of layer {layer.module.layer_idx}"
        valid = layer.kwargs.get("valid")
        if valid is None:
            valid = torch.ones(scores.shape[0], scores.shape[2], dtype=torch.bool, device=scores.device)
        drawable = valid.unsqueeze(1).expand_as(scores)
        oldest = valid.cumsum(-1).unsqueeze(1) <= press.n_sink
        newest = torch.arange(valid.shape[1], 0, -1, device=valid.device) <= press.n_recent
        take_all = (take_all_stratum(scores) | oldest | newest) & drawable
        self.weights.append(
            proposal_weights(
                scores,
                drawable & ~take_all,
                temperature=press.proposal_temperature,
                uniform_mix=press.uniform_mix,
                name=name,
            )
        )
        self.take_all.append(take_all)

    def end(self, prefill: Prefill) -> None:
        """Draw, pack every layer, and write the report."""
        press, cache, valid = self.press, prefill.cache, prefill.valid
        generator = press.generator()
        lengths = valid.sum(-1).tolist()
        before = cache_bytes(cache)
        if press.compression_ratio == 0 or not prefill.layers:
            self._report(
                prefill, lengths, self._all_kept(prefill, lengths), None, None, before, generator.initial_seed()
            )
            return

        t = valid.shape[1]
        padding = [t - length for length in lengths]
        draws = [self._draw_row(row, pad, generator) for row, pad in enumerate(padding)]
        kv_heads = self.weights[0].shape[1]
        for index, layer in enumerate(prefill.layers):
            heads = slice(index * kv_heads, (index + 1) * kv_heads)
            device = self.weights[index].device
            kept = torch.zeros(len(draws), kv_heads, t, dtype=torch.bool, device=device)
            log_w = torch.zeros(len(draws), kv_heads, t, device=device)
            for row, (pad, result) in enumerate(zip(padding, draws, strict=True)):
                kept[row, :, pad:] = result.kept[heads]
                log_w[row, :, pad:] = result.log_w[heads]
            compress_layer(cache, layer, kept, log_w, padding)

        def by_layer(per_row: list[Tensor]) -> Tensor:
            return torch.stack(per_row, 1).unflatten(0, (-1, kv_heads)).transpose(1, 2).cpu()  # [layers b hkv]

        kept_counts = by_layer([result.kept.sum(-1) for result in draws])
        effective = by_layer([effective_sample_size(result.log_w, result.kept) for result in draws])
        sizes = [result.draws for result in draws if result.draws is not None]
        self._report(
            prefill,
            lengths,
            kept_counts,
            effective,
            by_layer(sizes) if sizes else None,
            before,
            generator.initial_seed(),
        )

    def _draw_row(self, row: int, pad: int, generator: torch.Generator) -> Draw:
        """The draw of one batch row, as it would be alone: without its padding, from a generator at its start."""
        press = self.press
        device = self.weights[0].device
        generator.manual_seed(generator.initial_seed())
        weights = torch.cat([layer[row, :, pad:].to(device) for layer in self.weights])  # [layers*hkv t]
        take_all = torch.cat([layer[row, :, pad:].to(device) for layer in self.take_all])
        layer_of_head = torch.arange(len(self.weights), device=device).repeat_interleave(self.weights[0].shape[1])
        return draw(
            weights,
            take_all,
            groups_of(press.allocation, layer_of_head),
            keep_fraction=1 - press.compression_ratio,
            sampler=press.sampler,
            correction=press.correction,
            temperature=press.temperature,
            budget_weighting=press.budget_weighting,
            generator=generator,
        )

    def _all_kept(self, prefill: Prefill, lengths: list[int]) -> Tensor:
        heads = cast(Tensor, prefill.cache.layers[prefill.layers[0]].keys).shape[1] if prefill.layers else 0
        return torch.tensor(lengths).view(1, -1, 1).expand(len(prefill.layers), -1, heads)

    def _report(
        self,
        prefill: Prefill,
        lengths: list[int],
        kept: Tensor,
        effective: Tensor | None,
        draws: Tensor | None,
        before: int,
        seed: int,
    ) -> None:
        press = self.press
        press.report = CompressionReport(
            target_ratio=press.compression_ratio,
            context_lengths=lengths,
            layers=prefill.layers,
            kept=kept,
            effective=kept.double() if effective is None else effective,
            draws=draws,
            bytes_before=before,
            bytes_after=cache_bytes(prefill.cache),
            seed=seed,
            settings=f"{type(press.press).__name__}, {press.sampler}, {press.correction}, {press.allocation}",
        )
