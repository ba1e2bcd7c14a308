"""One dense prefill of a context, of whose cache every press compresses a copy.

A press acts after a layer's attention, so the dense prefill of a context is the same for every press. It runs once and
its layers are kept; then each press scores them and compresses a *copy* of the cache (``compressors``). Copies share
the dense tensors (nothing writes into them), so a copy costs what it keeps.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

from kvpress_prob.hf import LayerPrefill, Prefill, RaggedLayer, cache_bytes, decoder_of, watch_prefills
from kvpress_prob.hf.rotary import reachable_rotary
from kvpress_prob.presses.gathering import Gathered, GatheringKey

MaskedIndices = dict[nn.Module, tuple[Tensor, Tensor, Tensor]]
"""Per attention module, what kvpress hides from it: batch rows, heads and positions."""


@dataclass
class Costs:
    """Milliseconds of one compression.

    Attributes
    ----------
    score_ms
        What the press' scoring takes, whenever it was done.
    spent_ms
        Scoring that was done for this compression: 0 where earlier scores served.
    compress_ms
        Selecting and evicting.
    """

    score_ms: float = 0.0
    spent_ms: float = 0.0
    compress_ms: float = 0.0

    @contextmanager
    def clock(self, name: str, device: torch.device) -> Iterator[None]:
        """Add the time of the block to a field."""
        begin = now(device)
        yield
        setattr(self, name, getattr(self, name) + now(device) - begin)


@dataclass
class Compressed:
    """A context's cache under one press, ratio and seed.

    Attributes
    ----------
    cache : DynamicCache
        What the press left.
    masked : dict
        Entries that a masking press hides; empty for a press that really evicts.
    layer_ratios : list of float
        Evicted or hidden fraction of every full-attention layer.
    effective_fraction : float or None
        Effective sample size over kept entries.
    nbytes : int
        Bytes of the cache as the press holds it.
    costs : Costs
    """

    cache: DynamicCache
    masked: MaskedIndices
    layer_ratios: list[float]
    effective_fraction: float | None
    nbytes: int
    costs: Costs


def padded_ratio(compressed: Compressed, layers: list[int]) -> float:
    """Entries that caches with one length for all heads of a layer would hold, over the entries that are kept and not
    hidden."""
    hidden = {int(cast(Any, module).layer_idx): indices[1] for module, indices in compressed.masked.items()}
    padded = total = 0
    for index in layers:
        layer = compressed.cache.layers[index]
        if isinstance(layer, RaggedLayer):
            kept = layer.store.length.cpu()
        else:
            keys = cast(Tensor, layer.keys)
            kept = torch.full((keys.shape[1],), keys.shape[2])
            if index in hidden:
                kept -= torch.bincount(hidden[index].cpu(), minlength=len(kept))
        padded += int(kept.max()) * len(kept)
        total += int(kept.sum())
    return padded / max(total, 1)


class SharedPrefill:
    """A dense prefill and the records of its layers (a ``PrefillWatcher``).

    Holds hidden states and queries of every full-attention layer until it is dropped.
    """

    def __init__(self) -> None:
        self.layers: list[LayerPrefill] = []
        self.prefill: Prefill
        self.milliseconds = 0.0
        self.gathered: list[tuple[GatheringKey, Gathered, float]] = []

    @classmethod
    def run(cls, model: PreTrainedModel, context_ids: Tensor) -> SharedPrefill:
        """Prefill a context [1, t] the way kvpress' pipeline does, without any press."""
        shared = cls()
        begin = now(context_ids.device)
        with watch_prefills(model, lambda: shared):
            decoder = cast(Callable[..., Any], model.model)
            decoder(input_ids=context_ids, past_key_values=DynamicCache())
        shared.milliseconds = now(context_ids.device) - begin
        return shared

    def layer(self, layer: LayerPrefill) -> None:
        self.layers.append(layer)

    def end(self, prefill: Prefill) -> None:
        self.prefill = prefill

    @property
    def tokens(self) -> int:
        """Length of the context."""
        return self.prefill.valid.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the dense cache."""
        return cache_bytes(self.prefill.cache)

    @property
    def device(self) -> torch.device:
        return self.prefill.valid.device

    @contextmanager
    def rotary(self) -> Iterator[None]:
        """Rotary embeddings as they were during the prefill, where kvpress' scorers look for them."""
        with reachable_rotary(decoder_of(self.prefill.model)), self.prefill.rotary.held():
            yield

    def copy_cache(self) -> DynamicCache:
        """A cache of its own layer objects over the same dense tensors."""
        return copied(cast(DynamicCache, self.prefill.cache))


def copied(cache: DynamicCache) -> DynamicCache:
    cache = copy.copy(cache)
    cache.layers = [copy.copy(layer) for layer in cache.layers]
    return cache


def measured(shared: SharedPrefill, cache: DynamicCache, masked: MaskedIndices, costs: Costs) -> Compressed:
    """Measure a cache that a press has compressed."""
    ratios = []
    for layer in shared.layers:
        stored = cast(Tensor, cache.layers[cast(int, layer.module.layer_idx)].keys).shape[2]
        hidden = len(masked[layer.module][0]) / layer.keys.shape[1] if layer.module in masked else 0
        ratios.append(1 - (stored - hidden) / shared.tokens)
    return Compressed(cache, masked, ratios, None, cache_bytes(cache), costs)


def take_masked(layers: list[LayerPrefill]) -> MaskedIndices:
    """Collect what a press asked kvpress' attention to hide, and clear it from the modules."""
    masked: MaskedIndices = {}
    for layer in layers:
        module: Any = layer.module
        indices = getattr(module, "masked_key_indices", None)
        if indices is not None and len(indices[0]):
            masked[module] = indices
        module.masked_key_indices = None
    return masked


@contextmanager
def hidden_entries(masked: MaskedIndices) -> Iterator[None]:
    """Let kvpress' attention hide a compressed cache's masked entries inside the block."""
    modules = cast(dict[Any, Any], masked)
    for module, indices in modules.items():
        module.masked_key_indices = indices
    try:
        yield
    finally:
        for module in modules:
            module.masked_key_indices = None


def now(device: torch.device) -> float:
    """Milliseconds, after the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return 1e3 * time.perf_counter()
