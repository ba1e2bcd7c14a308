"""Every field of a saved cache, checked for what it can be: ``hf.saving`` builds a cache only from what passes.

Errors are ``ValueError`` and name the file and the field, as ``layers[2].padding`` or ``2.keys`` (a tensor).
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from kvpress_prob.hf.budget import CacheBudget
from kvpress_prob.hf.pool import POSITION, SCORES, PoolSettings
from kvpress_prob.hf.resampling import EXTRA, ResamplingSettings
from kvpress_prob.maths.draw import SAMPLERS, DrawSettings
from kvpress_prob.maths.importance import CORRECTIONS

Path = str | os.PathLike
_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def _whole(least: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer >= {least}", lambda it: type(it) is int and it >= least


def _number(low: float, high: float) -> tuple[str, Callable[[Any], bool]]:
    return f"a number in [{low}, {high}]", lambda it: type(it) in (int, float) and low <= it <= high


_STRING = ("a string", lambda it: isinstance(it, str))
_FLAG = ("true or false", lambda it: isinstance(it, bool))
_SEED = ("an integer", lambda it: type(it) is int)
_POSITIVE = ("a number > 0", lambda it: type(it) in (int, float) and it > 0)

_REPORT = {"settings": _STRING, "target_ratio": _number(0, 1), "achieved_ratio": _number(0, 1), "seed": _SEED}
_COMPRESSED = {
    "batch": _whole(1),
    "context_length": _whole(0),
    "appended": _whole(0),
    "hides": _FLAG,
    "spent": _FLAG,
}
_SLIDING = {"sliding_window": _whole(1), "cumulative_length": _whole(1)}
_DRAW = ("sampler", "correction", "temperature", "uniform_mix")
"""Settings of the draw that sampling again goes by."""
_RESAMPLING = {
    "sampler": (f"one of {SAMPLERS}", lambda it: it in SAMPLERS),
    "correction": (f"one of {CORRECTIONS}", lambda it: it in CORRECTIONS),
    "temperature": _POSITIVE,
    "uniform_mix": _number(0, 1),
    "n_sink": _whole(0),
    "seed": _SEED,
    "layer": _whole(0),
}
_MAPPING = ("a mapping", lambda it: isinstance(it, dict))
_FLAGS = (
    "a list of true and false",
    lambda it: isinstance(it, list) and len(it) > 0 and all(isinstance(part, bool) for part in it),
)
_BUDGET = {
    "max_entries": ("an integer >= 1 or null", lambda it: it is None or (type(it) is int and it >= 1)),
    "interval": _whole(1),
    "queries": _whole(1),
}
_POOL = {
    "budget": _MAPPING,
    "draw": _MAPPING,
    "compression_ratio": _number(0, 1),
    "n_sink": _whole(0),
    "n_recent": _whole(1),
    "changing": _FLAGS,
    "uniform": _FLAGS,
    "seed": _SEED,
}
_TENSORS = {
    "compressed": {"keys": 2, "values": 2, "log_w": 1, "length": 1},
    "dense": {"keys": 4, "values": 4},
    "sliding": {"keys": 4, "values": 4},
}


def parsed_header(path: Path, raw: str | None, newest: int) -> dict[str, Any]:
    """The header of a file, if its format is known; nothing else is checked.

    Raises
    ------
    ValueError
        Naming file and field.
    """
    if raw is None:
        raise _wrong(path, "header", "that of save_compressed", None)
    try:
        header = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be a complete file of save_compressed, got {error!r}") from error
    if not isinstance(header, dict):
        raise _wrong(path, "header", "a mapping", header)
    _check(path, "", header, {"format": _whole(1)})
    if header["format"] > newest:
        raise ValueError(f"{path} must have format {newest} or older, got {header['format']}: update kvpress-prob")
    return header


def check_header(path: Path, header: dict[str, Any]) -> None:
    """Check every field of a header.

    Raises
    ------
    ValueError
        Naming file and field.
    """
    maybe_string = ("a string or null", lambda it: it is None or isinstance(it, str))
    maybe_report = ("a mapping or null", lambda it: it is None or isinstance(it, dict))
    some_layers = ("a list of at least one layer", lambda it: isinstance(it, list) and len(it) > 0)
    fields = {"model": maybe_string, "report": maybe_report, "logical_length": _whole(1), "layers": some_layers}
    _check(path, "", header, fields)
    if header["report"] is not None:
        _check(path, "report.", header["report"], _REPORT)
    for index, layer in enumerate(header["layers"]):
        _check_layer(path, f"layers[{index}]", layer, header["logical_length"])
    batches = {layer["batch"] for layer in header["layers"] if layer["kind"] == "compressed"}
    if len(batches) > 1:
        raise _wrong(path, "layers[].batch", "the same in every layer", sorted(batches))


def _check_layer(path: Path, name: str, layer: Any, length: int) -> None:
    if not isinstance(layer, dict):
        raise _wrong(path, name, "a mapping", layer)
    _check(path, f"{name}.", layer, {"kind": (f"one of {sorted(_TENSORS)}", lambda it: it in list(_TENSORS))})
    if layer["kind"] == "sliding":
        _check(path, f"{name}.", layer, _SLIDING)
        _agree(path, f"{name}.cumulative_length", layer["cumulative_length"], length)
    if layer["kind"] != "compressed":
        return
    _check(path, f"{name}.", layer, _COMPRESSED)
    batch, context = layer["batch"], layer["context_length"]
    _agree(path, f"{name}.context_length + appended", context + layer["appended"], length)
    # Before a bounded cache has evicted anything, its context is the padding alone.
    padding = _per_row(batch, context if "pool" in layer else context - 1)
    _check(path, f"{name}.", layer, {"padding": padding})
    if "resampling" in layer:
        _check(path, f"{name}.", layer, {"resampling": _MAPPING})
        _check(path, f"{name}.", layer, {"rounds": _per_row(batch, math.inf)})
        settings = layer["resampling"]
        _check(path, f"{name}.resampling.", settings, _RESAMPLING)
        _check(path, f"{name}.resampling.", settings, {"budget": _MAPPING})
        _check(path, f"{name}.resampling.budget.", settings["budget"], _BUDGET)
        if "pool" not in layer:  # whose budget may be a ratio of what was read
            _check(path, f"{name}.resampling.budget.", settings["budget"], {"max_entries": _whole(1)})
        try:
            resampling_settings(settings)
        except (TypeError, ValueError) as error:
            raise _wrong(path, f"{name}.resampling", "settings of a press", error) from error
        if "limit" in layer:
            _check(path, f"{name}.", layer, {"limit": _per_row(batch, math.inf)})
    if "pool" in layer:
        _check(path, f"{name}.", layer, {"pool": _MAPPING, "resampling": _MAPPING})
        _check_pool(path, f"{name}.pool.", layer["pool"], batch)


def _check_pool(path: Path, name: str, pool: dict[str, Any], batch: int) -> None:
    fields = {"settings": _MAPPING, "layer": _whole(0), "evicted": _FLAG, "boundary": _per_row(batch, math.inf)}
    _check(path, name, pool, fields)
    _check(path, f"{name}settings.", pool["settings"], _POOL)
    _check(path, f"{name}settings.budget.", pool["settings"]["budget"], _BUDGET)
    try:
        settings = pool_settings(pool["settings"])
    except (TypeError, ValueError) as error:
        raise _wrong(path, f"{name}settings", "settings of a press", error) from error
    if len(settings.changing) != len(settings.uniform):
        raise _wrong(path, f"{name}settings.uniform", "as long as changing", settings.uniform)


def pool_settings(described: dict[str, Any]) -> PoolSettings:
    """The settings of a pool that a header describes."""
    flags = {name: tuple(described[name]) for name in ("changing", "uniform")}
    parts = {"budget": CacheBudget(**described["budget"]), "draw": DrawSettings(**described["draw"])}
    return PoolSettings(**described | flags | parts)


def resampling_settings(described: dict[str, Any]) -> ResamplingSettings:
    """The settings that a header describes."""
    draw = DrawSettings(**{name: described[name] for name in _DRAW})
    rest = {name: value for name, value in described.items() if name not in _DRAW}
    return ResamplingSettings(**rest | {"budget": CacheBudget(**described["budget"]), "draw": draw})


def described_settings(settings: ResamplingSettings) -> dict[str, Any]:
    """Settings as a header describes them."""
    described = asdict(settings)
    draw = described.pop("draw")
    described["budget"] = {name: described["budget"][name] for name in _BUDGET}
    return described | {name: draw[name] for name in _DRAW}


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
                raise _wrong(path, name, "there", "nothing")
            if held[name].ndim != dimensions:
                raise _wrong(path, name, f"a tensor of {dimensions} dimensions", tuple(held[name].shape))
        keys, values = held[f"{index}.keys"], held[f"{index}.values"]
        if keys.dtype not in _FLOATS or keys.shape[-1] < 1:
            raise _wrong(path, f"{index}.keys", "floating numbers", f"{tuple(keys.shape)} of {keys.dtype}")
        if values.shape[:-1] != keys.shape[:-1] or values.dtype != keys.dtype or values.shape[-1] < 1:
            wanted_shape = f"{(*keys.shape[:-1], 'any')} of {keys.dtype} as the keys"
            raise _wrong(path, f"{index}.values", wanted_shape, f"{tuple(values.shape)} of {values.dtype}")
        if layer["kind"] == "compressed":
            _check_compressed(path, index, layer, held)
            shapes[index] = layer["batch"]
        else:
            _check_dense(path, index, layer, keys, header["logical_length"])
            shapes[index] = keys.shape[0]
    if len(set(shapes.values())) > 1:
        raise _wrong(path, "keys", "of the same batch in every layer", shapes)
    if held.keys() - known:
        raise _wrong(path, sorted(held.keys() - known)[0], "a tensor of one of the layers", "one of none")


def _check_dense(path: Path, index: int, layer: dict[str, Any], keys: Tensor, length: int) -> None:
    stored = keys.shape[2]
    if min(keys.shape) < 1 or (stored != length if layer["kind"] == "dense" else stored > length):
        raise _wrong(path, f"{index}.keys", f"entries of {length} tokens", tuple(keys.shape))


def _check_compressed(path: Path, index: int, layer: dict[str, Any], held: dict[str, Tensor]) -> None:
    keys, log_w, length = (held[f"{index}.{name}"] for name in ("keys", "log_w", "length"))
    batch, appended = layer["batch"], layer["appended"]
    if length.dtype != torch.int64 or len(length) == 0 or len(length) % batch:
        got = f"{len(length)} of {length.dtype}"
        raise _wrong(path, f"{index}.length", f"int64, a multiple of {batch} rows", got)
    limit = torch.tensor([layer["context_length"] - it + appended for it in layer["padding"]], device=length.device)
    limit = limit.repeat_interleave(len(length) // batch)
    if (length < max(appended, 1)).any() or (length > limit).any():
        raise _wrong(path, f"{index}.length", f"in [{max(appended, 1)}, the row's tokens]", length.tolist())
    if int(length.sum()) != len(keys):
        raise _wrong(path, f"{index}.keys", f"{int(length.sum())} entries, the sum of {index}.length", len(keys))
    if log_w.dtype != torch.float32 or len(log_w) != len(keys):
        raise _wrong(path, f"{index}.log_w", f"{len(keys)} of torch.float32", f"{len(log_w)} of {log_w.dtype}")
    # Appended entries that a mask hides weigh nothing; every other weight is a number.
    end = length.cumsum(0).repeat_interleave(length)
    hidden = (log_w == -torch.inf) & (torch.arange(len(log_w), device=log_w.device) >= end - appended)
    if not (log_w.isfinite() | hidden).all():
        raise _wrong(path, f"{index}.log_w", "finite", "NaN" if log_w.isnan().any() else "infinite weights")
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
        raise _wrong(path, f"{index}.queries", wanted, f"{tuple(queries.shape)} of {queries.dtype}")


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
            raise _wrong(path, f"{index}.{name}", f"{shape} of {dtype}", f"{tuple(got.shape)} of {got.dtype}")


def _per_row(batch: int, most: float) -> tuple[str, Callable[[Any], bool]]:
    def is_right(it: Any) -> bool:
        return isinstance(it, list) and len(it) == batch and all(type(row) is int and 0 <= row <= most for row in it)

    return f"a list of {batch} integers in [0, {most}]", is_right


def _check(
    path: Path, place: str, described: dict[str, Any], fields: dict[str, tuple[str, Callable[[Any], bool]]]
) -> None:
    for name, (wanted, is_right) in fields.items():
        if name not in described or not is_right(described[name]):
            raise _wrong(path, place + name, wanted, described.get(name, "nothing"))


def _agree(path: Path, field: str, got: int, length: int) -> None:
    if got != length:
        raise _wrong(path, field, f"logical_length = {length}", got)


def _wrong(path: Path, field: str, wanted: str, got: Any) -> ValueError:
    return ValueError(f"{path} must be a complete file of save_compressed: {field} must be {wanted}, got {got!r}")
