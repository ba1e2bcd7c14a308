"""Every tensor of a saved cache, checked against the header that describes it (``hf.saved_fields``)."""

from typing import Any

import torch
from torch import Tensor

from kvpress_prob.hf.pool import POSITION, SCORES
from kvpress_prob.hf.resampling import EXTRA
from kvpress_prob.hf.saved_fields import Path, wrong

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_TENSORS = {
    "compressed": {"keys": 2, "values": 2, "log_w": 1, "length": 1},
    "dense": {"keys": 4, "values": 4},
    "sliding": {"keys": 4, "values": 4},
}


def check_tensors(path: Path, header: dict[str, Any], held: dict[str, Tensor]) -> None:
    """Check a file's tensors against its header, which has been checked.

    Raises
    ------
    ValueError
        Naming file and tensor.
    """
    known, shapes = set(), {}
    for index, layer in enumerate(header["layers"]):
        wanted = dict(_TENSORS[layer["kind"]])
        if "resampling" in layer and f"{index}.queries" in held:
            wanted["queries"] = 4
        if "pool" in layer:
            wanted |= {"log_scale": 3, "log_tau": 3}
            wanted |= {f"column.{POSITION}": 1, f"column.{SCORES}": 2, f"column.{EXTRA}": 1}
        for name, dimensions in wanted.items():
            name = f"{index}.{name}"
            known.add(name)
            if name not in held:
                raise wrong(path, name, "there", "nothing")
            if held[name].ndim != dimensions:
                raise wrong(path, name, f"a tensor of {dimensions} dimensions", tuple(held[name].shape))
        keys, values = held[f"{index}.keys"], held[f"{index}.values"]
        if keys.dtype not in _FLOATS or keys.shape[-1] < 1:
            raise wrong(path, f"{index}.keys", "floating numbers", f"{tuple(keys.shape)} of {keys.dtype}")
        if values.shape[:-1] != keys.shape[:-1] or values.dtype != keys.dtype or values.shape[-1] < 1:
            wanted_shape = f"{(*keys.shape[:-1], 'any')} of {keys.dtype} as the keys"
            raise wrong(path, f"{index}.values", wanted_shape, f"{tuple(values.shape)} of {values.dtype}")
        if layer["kind"] == "compressed":
            _check_compressed(path, index, layer, held)
            shapes[index] = layer["batch"]
        else:
            _check_dense(path, index, layer, keys, header["logical_length"])
            shapes[index] = keys.shape[0]
    if len(set(shapes.values())) > 1:
        raise wrong(path, "keys", "of the same batch in every layer", shapes)
    if held.keys() - known:
        raise wrong(path, sorted(held.keys() - known)[0], "a tensor of one of the layers", "one of none")


def _check_dense(path: Path, index: int, layer: dict[str, Any], keys: Tensor, length: int) -> None:
    stored = keys.shape[2]
    if min(keys.shape) < 1 or (stored != length if layer["kind"] == "dense" else stored > length):
        raise wrong(path, f"{index}.keys", f"entries of {length} tokens", tuple(keys.shape))


def _check_compressed(path: Path, index: int, layer: dict[str, Any], held: dict[str, Tensor]) -> None:
    keys, log_w, length = (held[f"{index}.{name}"] for name in ("keys", "log_w", "length"))
    batch, appended = layer["batch"], layer["appended"]
    if length.dtype != torch.int64 or len(length) == 0 or len(length) % batch:
        got = f"{len(length)} of {length.dtype}"
        raise wrong(path, f"{index}.length", f"int64, a multiple of {batch} rows", got)
    limit = torch.tensor([layer["context_length"] - it + appended for it in layer["padding"]], device=length.device)
    # A row of which only padding was left when the cache was cropped has no entry.
    limit = limit.clamp(min=0).repeat_interleave(len(length) // batch)
    if (length < limit.clamp(max=max(appended, 1))).any() or (length > limit).any():
        raise wrong(path, f"{index}.length", f"in [{max(appended, 1)}, the row's tokens]", length.tolist())
    if int(length.sum()) != len(keys):
        raise wrong(path, f"{index}.keys", f"{int(length.sum())} entries, the sum of {index}.length", len(keys))
    if log_w.dtype != torch.float32 or len(log_w) != len(keys):
        raise wrong(path, f"{index}.log_w", f"{len(keys)} of torch.float32", f"{len(log_w)} of {log_w.dtype}")
    # Appended entries that a mask hides weigh nothing; every other weight is a number.
    end = length.cumsum(0).repeat_interleave(length)
    hidden = (log_w == -torch.inf) & (torch.arange(len(log_w), device=log_w.device) >= end - appended)
    if not (log_w.isfinite() | hidden).all():
        raise wrong(path, f"{index}.log_w", "finite", "NaN" if log_w.isnan().any() else "infinite weights")
    if "pool" in layer:
        _check_pool_tensors(path, index, layer, held)
    queries = held.get(f"{index}.queries")
    if queries is None or "resampling" not in layer:
        return
    heads = len(length) // batch
    most = min(layer["resampling"]["budget"]["queries"], appended)
    fits = queries.shape[0] == batch and queries.shape[1] % heads == 0 and 1 <= queries.shape[2] <= most
    if not fits or queries.shape[3] != keys.shape[1] or queries.dtype not in _FLOATS:
        wanted = f"[{batch}, a multiple of {heads}, at most {most}, {keys.shape[1]}] floating numbers"
        raise wrong(path, f"{index}.queries", wanted, f"{tuple(queries.shape)} of {queries.dtype}")


def _check_pool_tensors(path: Path, index: int, layer: dict[str, Any], held: dict[str, Tensor]) -> None:
    """Shapes and dtypes; any number is a score, a scale or a threshold, not a number too."""
    entries, components = len(held[f"{index}.keys"]), len(layer["pool"]["settings"]["changing"])
    per_head = (layer["batch"], components, len(held[f"{index}.length"]) // layer["batch"])
    wanted = {
        "log_scale": (per_head, torch.float64),
        "log_tau": (per_head, torch.float64),
        f"column.{POSITION}": ((entries,), torch.int32),
        f"column.{SCORES}": ((entries, components), torch.float32),
        f"column.{EXTRA}": ((entries,), torch.float32),
    }
    for name, (shape, dtype) in wanted.items():
        got = held[f"{index}.{name}"]
        if tuple(got.shape) != shape or got.dtype != dtype:
            raise wrong(path, f"{index}.{name}", f"{shape} of {dtype}", f"{tuple(got.shape)} of {got.dtype}")
