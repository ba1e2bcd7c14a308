"""From a dense cache to a compressed one, and how many bytes either holds."""

from collections.abc import Sequence
from typing import Any, cast

from torch import Tensor
from transformers import Cache

from kvpress_prob.hf.cache import RaggedLayer, reads_of
from kvpress_prob.hf.resampling import ResamplingSettings
from kvpress_prob.ops.precision import one_dtype
from kvpress_prob.ragged import RaggedKV


def compress_layer(
    cache: Cache,
    layer_idx: int,
    kept: Tensor,
    log_w: Tensor,
    padding: list[int],
    resampling: ResamplingSettings | None = None,
    lengths: list[int] | None = None,
) -> None:
    """Replace a dense layer by its kept entries; the dense tensors are released before the next layer is packed.

    Parameters
    ----------
    cache : Cache
        Changed in place.
    layer_idx : int
    kept : Bool[Tensor, "b hkv t"]
    log_w : Float[Tensor, "b hkv t"]
    padding : list of int
        Left padding of each batch row.
    resampling : ResamplingSettings, optional
        Budget for decoding.
    lengths : list of int, optional
        ``kept.sum(-1)``, batch rows outermost, where the host knows it already.
    """
    dense = cache.layers[layer_idx]
    keys, values = one_dtype(cast(Tensor, dense.keys), cast(Tensor, dense.values))
    store = RaggedKV.pack(keys, values, kept, log_w, lengths=lengths)
    cache.layers[layer_idx] = RaggedLayer(store, keys.shape[2], padding, resampling, reads_of(cache))
    dense.keys = dense.values = None


def cache_bytes(cache: Cache) -> int:
    """Bytes that the cache's tensors hold, measured on their storages; a storage that several tensors share counts
    once."""
    return bytes_of(cache.layers)


def bytes_of(layers: Sequence[Any]) -> int:
    """``cache_bytes`` of some layers."""
    storages: dict[int, int] = {}
    for layer in layers:
        if isinstance(layer, RaggedLayer):
            tensors = list(layer.store.tensors)
            if layer.pool is not None:
                tensors += [layer.pool.log_scale, layer.pool.log_tau]
            if layer.resampler is not None and layer.resampler.queries is not None:
                tensors.append(layer.resampler.queries)
        else:
            tensors = [value for value in vars(layer).values() if isinstance(value, Tensor)]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def bytes_per_token(cache: Cache) -> int:
    """Bytes of one more token's entries in every row, head and layer, weights included."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, RaggedLayer):
            total += len(layer.store.start) * layer.store.place_bytes
        else:
            dense = [it for it in (layer.keys, layer.values) if it is not None and it.numel()]
            total += sum(it.nbytes // it.shape[2] for it in dense)
    return total
