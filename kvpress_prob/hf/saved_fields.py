"""Every field of a saved cache, checked for what it can be: ``hf.saving`` builds a cache only from what passes.

Errors are ``ValueError`` and name the file and the field, as ``layers[2].padding`` or ``2.keys`` (a tensor).
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from kvpress_prob.hf.budget import CacheBudget
from kvpress_prob.hf.pool import PoolSettings
from kvpress_prob.hf.resampling import ResamplingSettings
from kvpress_prob.maths.draw import SAMPLERS, DrawSettings
from kvpress_prob.maths.importance import CORRECTIONS

Path = str | os.PathLike


def _whole(least: int) -> tuple[str, Callable[[Any], bool]]:
    return f"an integer >= {least}", lambda it: type(it) is int and it >= least


def _number(low: float, high: float) -> tuple[str, Callable[[Any], bool]]:
    return f"a number in [{low}, {high}]", lambda it: type(it) in (int, float) and low <= it <= high


_KINDS = ("compressed", "dense", "sliding")
_STRING = ("a string", lambda it: isinstance(it, str))
_FLAG = ("true or false", lambda it: isinstance(it, bool))
_SEED = ("an integer", lambda it: type(it) is int)
_MAYBE_SEED = ("an integer or null", lambda it: it is None or type(it) is int)
_POSITIVE = ("a number > 0", lambda it: type(it) in (int, float) and it > 0)

_REPORT = {"settings": _STRING, "target_ratio": _number(0, 1), "achieved_ratio": _number(0, 1), "seed": _MAYBE_SEED}
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
    "scorers": _STRING,
}


def parsed_header(path: Path, raw: str | None, newest: int) -> dict[str, Any]:
    """The header of a file, if its format is known; nothing else is checked.

    Raises
    ------
    ValueError
        Naming file and field.
    """
    if raw is None:
        raise wrong(path, "header", "that of save_compressed", None)
    try:
        header = json.loads(raw)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be a complete file of save_compressed, got {error!r}") from error
    if not isinstance(header, dict):
        raise wrong(path, "header", "a mapping", header)
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
        raise wrong(path, "layers[].batch", "the same in every layer", sorted(batches))


def _check_layer(path: Path, name: str, layer: Any, length: int) -> None:
    if not isinstance(layer, dict):
        raise wrong(path, name, "a mapping", layer)
    _check(path, f"{name}.", layer, {"kind": (f"one of {list(_KINDS)}", lambda it: it in _KINDS)})
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
            raise wrong(path, f"{name}.resampling", "settings of a press", error) from error
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
        raise wrong(path, f"{name}settings", "settings of a press", error) from error
    if len(settings.changing) != len(settings.uniform):
        raise wrong(path, f"{name}settings.uniform", "as long as changing", settings.uniform)


def pool_settings(described: dict[str, Any]) -> PoolSettings:
    """The settings of a pool that a header describes."""
    flags = {name: tuple(described[name]) for name in ("changing", "uniform")}
    parts = {"budget": CacheBudget(**described["budget"]), "draw": DrawSettings(**described["draw"])}
    settings: dict[str, Any] = {**described, **flags, **parts}
    return PoolSettings(**settings)


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


def _per_row(batch: int, most: float) -> tuple[str, Callable[[Any], bool]]:
    def is_right(it: Any) -> bool:
        return isinstance(it, list) and len(it) == batch and all(type(row) is int and 0 <= row <= most for row in it)

    return f"a list of {batch} integers in [0, {most}]", is_right


def _check(
    path: Path, place: str, described: dict[str, Any], fields: dict[str, tuple[str, Callable[[Any], bool]]]
) -> None:
    for name, (wanted, is_right) in fields.items():
        if name not in described or not is_right(described[name]):
            raise wrong(path, place + name, wanted, described.get(name, "nothing"))


def _agree(path: Path, field: str, got: int, length: int) -> None:
    if got != length:
        raise wrong(path, field, f"logical_length = {length}", got)


def wrong(path: Path, field: str, wanted: str, got: Any) -> ValueError:
    """The error for a field of a file."""
    return ValueError(f"{path} must be a complete file of save_compressed: {field} must be {wanted}, got {got!r}")
