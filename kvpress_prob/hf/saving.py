"""Keeping a compressed cache: ``save_compressed`` and ``load_compressed``. Compress once, serve many.

A file is in safetensors format: raw tensors and a JSON header, so loading runs no code. Of a compressed layer it holds
the stored entries without slack, of any other layer the dense tensors::

    tensors    "{layer}.keys" [n, d], "{layer}.values" [n, dv], "{layer}.log_w" [n], "{layer}.length" [batch * hkv]
               "{layer}.column.{name}" [n, ...], "{layer}.log_scale", "{layer}.log_tau"    of a bounded cache's pool
               "{layer}.keys" [batch, hkv, t, d], "{layer}.values" [batch, hkv, t, dv]     where nothing is compressed
    header     "kvpress_prob": format, package, model, report, layers

What is read is checked field by field (``hf.saved_fields``) before a cache exists.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from kvpress_prob.hf.cache import RaggedLayer, reads_of
from kvpress_prob.hf.files import replacing
from kvpress_prob.hf.fingerprint import fingerprint
from kvpress_prob.hf.pool import Pool
from kvpress_prob.hf.resampling import Resampler
from kvpress_prob.hf.saved_fields import (
    check_header,
    described_settings,
    parsed_header,
    pool_settings,
    resampling_settings,
)
from kvpress_prob.hf.saved_tensors import check_tensors
from kvpress_prob.hf.shared_reads import SharedReads
from kvpress_prob.hf.supported import check_cache
from kvpress_prob.ragged import RaggedKV
from kvpress_prob.ragged.store import initial_room

FORMAT = 2
_KEY = "kvpress_prob"


class Report(Protocol):
    """What a file keeps of a press' report."""

    @property
    def settings(self) -> str: ...
    @property
    def target_ratio(self) -> float: ...
    @property
    def achieved_ratio(self) -> float: ...
    @property
    def seed(self) -> int: ...


def save_compressed(
    cache: Cache, path: str | os.PathLike, *, model: PreTrainedModel | None = None, report: Report | None = None
) -> None:
    """Write a cache to a file; an existing file is replaced only when the new one is complete.

    Parameters
    ----------
    cache : Cache
        A ``DynamicCache``, compressed or not, with whatever was appended to it.
    path : str or PathLike
    model : PreTrainedModel, optional
        Whose cache it is; then ``load_compressed`` can tell it from another model's.
    report : CompressionReport, optional
        ``press.report``: press, ratio and seed are noted in the header.

    Raises
    ------
    TypeError
        For a cache that cannot be compressed (static, quantized, offloaded).
    ValueError
        For an empty cache.
    FileNotFoundError
        For a path in a folder that does not exist.
    """
    check_cache(cache)
    if cache.get_seq_length() == 0:
        raise ValueError("cache must hold a context, got an empty cache")
    tensors, layers = {}, []
    for index, layer in enumerate(cache.layers):
        described, held = _ragged(layer) if isinstance(layer, RaggedLayer) else _dense(layer)
        layers.append(described)
        tensors |= {f"{index}.{name}": tensor for name, tensor in held.items()}
    header = {
        "format": FORMAT,
        "model": None if model is None else fingerprint(model),
        "logical_length": cache.get_seq_length(),
        "report": None if report is None else {name: getattr(report, name) for name in _REPORTED},
        "layers": layers,
    }
    with replacing(Path(path)) as temporary:
        save_file(tensors, temporary, {_KEY: json.dumps(header, default=lambda number: number.item())})


_REPORTED = ("settings", "target_ratio", "achieved_ratio", "seed")


def load_compressed(
    path: str | os.PathLike, device: torch.device | str = "cpu", *, model: PreTrainedModel | None = None
) -> DynamicCache:
    """Read a cache that ``save_compressed`` wrote: ``model(..., past_key_values=load_compressed(path))``.

    Parameters
    ----------
    path : str or PathLike
    device : torch.device or str
        Where the cache's tensors go: the device of the model.
    model : PreTrainedModel, optional
        Refuse a file that was saved from another model.

    Raises
    ------
    FileNotFoundError
    ValueError
        For a file that is truncated, foreign, of a newer format, or another model's, and for one with a field that
        cannot be: the error names file and field.
    """
    # Outside inference mode, so that the cache can be appended to anywhere.
    with torch.inference_mode(False), torch.no_grad(), _opened(path, device) as (file, header):
        check_header(path, header)
        if model is not None:
            _check_model(path, header, model)
        held = {name: file.get_tensor(name) for name in sorted(file.keys())}
        check_tensors(path, header, held)
        cache = DynamicCache()
        for index, described in enumerate(header["layers"]):
            cache.layers.append(_layer(held, index, described, reads_of(cache)))
    return cache


def read_header(path: str | os.PathLike) -> dict[str, Any]:
    """The header alone, as it stands: format, model fingerprint, logical length, report and the layers' kinds.

    Raises
    ------
    FileNotFoundError, ValueError
        As ``load_compressed``.
    """
    with _opened(path, "cpu") as (_, header):
        return header


def _ragged(layer: RaggedLayer) -> tuple[dict[str, Any], dict[str, Tensor]]:
    store = layer.store
    segments = [store.segment(row, head) for row in range(store.batch) for head in range(store.kv_heads)]
    keys, values, log_w = (torch.cat(parts) for parts in zip(*segments, strict=True))
    described = {
        "kind": "compressed",
        "batch": store.batch,
        "context_length": layer.context_length,
        "appended": layer.appended,
        "padding": layer.padding,
        "hides": layer.hides,
        "spent": layer.spent,
    }
    held = {"keys": keys, "values": values, "log_w": log_w, "length": store.length.clone()}
    if layer.resampler is not None:
        described |= {"resampling": described_settings(layer.resampler.settings), "rounds": layer.resampler.rounds}
        described["limit"] = layer.resampler.limit
        if layer.resampler.queries is not None:
            held["queries"] = layer.resampler.queries.contiguous()
    if layer.pool is not None:
        pool, (place, _) = layer.pool, store.entries()
        described["pool"] = {
            "settings": asdict(pool.settings),
            "layer": pool.layer,
            "boundary": pool.boundary,
            "evicted": pool.evicted,
        }
        held |= {"log_scale": pool.log_scale.contiguous(), "log_tau": pool.log_tau.contiguous()}
        held |= {f"column.{name}": column[place] for name, column in store.columns.items()}
    return described, held


def _dense(layer: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    described: dict[str, Any] = {"kind": "dense"}
    if isinstance(layer, DynamicSlidingWindowLayer):
        described = {
            "kind": "sliding",
            "sliding_window": layer.sliding_window,
            "cumulative_length": layer.cumulative_length,
        }
    return described, {name: getattr(layer, name).detach().clone().contiguous() for name in ("keys", "values")}


@contextmanager
def _opened(path: str | os.PathLike, device: torch.device | str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The file and its header; what does not fit together becomes one ``ValueError``."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            header = parsed_header(path, (file.metadata() or {}).get(_KEY), FORMAT)
            yield file, header
    except SafetensorError as error:
        raise ValueError(f"{path} must be a complete file of save_compressed, got {error!r}") from error


def _check_model(path: str | os.PathLike, header: dict[str, Any], model: PreTrainedModel) -> None:
    if header["model"] is None:
        raise ValueError(f"{path} must name its model to be checked against one: it was saved without model=")
    if header["model"] != fingerprint(model):
        raise ValueError(f"{path} must be a cache of this model, got a cache of another model")


def _compressed_layer(
    held: dict[str, Tensor], index: int, described: dict[str, Any], store: RaggedKV, reads: SharedReads
) -> RaggedLayer:
    layer = RaggedLayer(store, described["context_length"], described["padding"], reads=reads)
    layer.appended, layer.hides, layer.spent = described["appended"], described["hides"], described["spent"]
    if "resampling" in described:
        layer.resampler = Resampler(resampling_settings(described["resampling"]), store)
        layer.resampler.rounds = described["rounds"]
        layer.resampler.limit = described.get("limit", layer.resampler.limit)
        layer.resampler.count(store, layer.appended)
        layer.resampler.queries = held.get(f"{index}.queries")
    if "pool" in described:
        _restore_pool(held, index, described["pool"], layer)
    return layer


def _restore_pool(held: dict[str, Tensor], index: int, described: dict[str, Any], layer: RaggedLayer) -> None:
    store = layer.store
    settings, device = pool_settings(described["settings"]), store.log_w.device
    pool = Pool(settings, described["layer"], store.batch, store.kv_heads, device)
    pool.boundary, pool.evicted = described["boundary"], described["evicted"]
    pool.log_scale, pool.log_tau = held[f"{index}.log_scale"], held[f"{index}.log_tau"]
    layer.store, layer.pool = pool.adopt(store), pool
    place, _ = store.entries()
    for name, column in layer.store.columns.items():
        column[place] = held[f"{index}.column.{name}"]


def _layer(
    held: dict[str, Tensor], index: int, described: dict[str, Any], reads: SharedReads
) -> RaggedLayer | DynamicLayer:
    # A layer's tensors leave `held`, so that at most one layer is there twice.
    keys, values = held.pop(f"{index}.keys"), held.pop(f"{index}.values")
    if described["kind"] == "compressed":
        log_w, lengths = held.pop(f"{index}.log_w"), held.pop(f"{index}.length").tolist()
        store = RaggedKV.empty(keys, values, lengths, described["batch"], initial_room(lengths))
        begin = 0
        for start, length in zip(store.start.tolist(), lengths, strict=True):
            source, target = slice(begin, begin + length), slice(start, start + length)
            store.keys[target], store.values[target], store.log_w[target] = keys[source], values[source], log_w[source]
            begin += length
        return _compressed_layer(held, index, described, store, reads)
    sliding = described["kind"] == "sliding"
    layer = DynamicSlidingWindowLayer(described["sliding_window"]) if sliding else DynamicLayer()
    layer.lazy_initialization(keys, values)
    layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = described["cumulative_length"]
    return layer
