"""The presses of an evaluation: this package's by their registry names, and kvpress' as baselines.

Baselines have the names and settings of kvpress' own evaluation registry, so that ``eval`` and ``sweep`` mean the same
by a name; presses that it does not list are named after their class. Two are added: ``h2o``, kvpress'
ObservedAttentionPress without eager attention, and ``expected_attention_topk``, which really evicts where kvpress'
``expected_attention`` (inside AdaKV) masks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, cast, get_type_hints

from kvpress import (
    AdaKVPress,
    BasePress,
    CapPress,
    ChunkKVPress,
    CompactorPress,
    CriticalAdaKVPress,
    CriticalKVPress,
    CURPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVgradPress,
    KVzipPress,
    LagKVPress,
    LeverageScorePress,
    MergingPress,
    NonCausalAttnPress,
    PyramidKVPress,
    RandomPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
)

from kvpress_prob.presses import PHYSICAL_PRESSES, PRESSES, H2OPress, make_press
from kvpress_prob.records import NO_PRESS
from kvpress_prob.values import fits, said

BASELINES: dict[str, Callable[[], BasePress]] = {
    "snapkv": SnapKVPress,
    "tova": TOVAPress,
    "streaming_llm": StreamingLLMPress,
    "knorm": KnormPress,
    "h2o": lambda: H2OPress(average=True),
    "keydiff": KeyDiffPress,
    "expected_attention_topk": ExpectedAttentionPress,
    "compactor": CompactorPress,
    "expected_attention": lambda: AdaKVPress(ExpectedAttentionPress(epsilon=1e-2)),
    "adakv_snapkv": lambda: AdaKVPress(SnapKVPress()),
    "kvzip": KVzipPress,
    "kvgrad": KVgradPress,
    "critical_snapkv": lambda: CriticalKVPress(SnapKVPress()),
    "critical_adakv_snapkv": lambda: CriticalAdaKVPress(SnapKVPress()),
    "critical_expected_attention": lambda: CriticalKVPress(ExpectedAttentionPress(use_vnorm=False)),
    "pyramidkv": PyramidKVPress,
    "chunkkv": lambda: ChunkKVPress(SnapKVPress(), chunk_length=20),
    "merging_snapkv": lambda: MergingPress(SnapKVPress()),
    "lagkv": LagKVPress,
    "cur": CURPress,
    "cap": CapPress,
    "leverage": LeverageScorePress,
    "non_causal": NonCausalAttnPress,
    "random": RandomPress,
}


def press_names() -> list[str]:
    """All names that a configuration may use."""
    return [NO_PRESS, *PRESSES, *PHYSICAL_PRESSES, *BASELINES]


@dataclass(frozen=True)
class PressSpec:
    """One press of a sweep.

    Parameters
    ----------
    press : str
        One of ``press_names()``. ``no_press`` is the dense cache.
    options : dict
        Fields of the press to change; ``press.max_rows`` reaches into a wrapped press,
        ``press.0.share`` into the first of several components.
    label : str, optional
        How results call it. Default: the name, with the options in brackets.
    """

    press: str
    options: dict[str, bool | int | float | str | None] = field(default_factory=dict)
    label: str | None = None

    @property
    def name(self) -> str:
        """The label."""
        if self.label is not None:
            return self.label
        options = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.press}({options})" if options else self.press

    def build(self) -> BasePress | None:
        """A new press; None for ``no_press``.

        Raises
        ------
        ValueError
            For an unknown name or option, or a value that the press refuses.
        """
        if self.press not in press_names():
            raise ValueError(f"press must be one of {press_names()}, got {self.press!r}")
        if self.press == NO_PRESS:
            if self.options:
                raise ValueError(f"options of {NO_PRESS} must be empty, got {self.options}")
            if self.name != NO_PRESS:
                raise ValueError(f"label of {NO_PRESS} must be left out: reports look for it, got {self.label!r}")
            return None
        if self.name == NO_PRESS:
            raise ValueError(f"label must not be that of the dense cache, got {self.label!r} for {self.press}")
        press = BASELINES[self.press]() if self.press in BASELINES else make_press(self.press)
        for key in self.options:
            if not isinstance(key, str):
                raise ValueError(f"options of {self.press} must have names as keys, got {key!r}")
        try:
            return _changed(press, self.options)
        except (AssertionError, TypeError) as error:  # how kvpress' presses refuse a value
            raise ValueError(f"options of {self.press} must be valid, got {self.options}: {error}") from error


def _changed(owner: Any, options: dict[str, Any]) -> Any:
    """The press, or part of a press, with other field values, checked by its own ``__post_init__``.

    A key reaches into fields and, by number, into lists: ``press.max_rows``, ``press.0.press.source.fraction``.
    """
    if not options:
        return owner
    if isinstance(owner, list):
        allowed = [str(index) for index in range(len(owner))]
        values: dict[str, Any] = dict(zip(allowed, owner, strict=True))
    elif is_dataclass(owner):
        allowed = [entry.name for entry in fields(owner) if entry.init and not entry.name.startswith("_")]
        if isinstance(owner, BasePress):
            allowed = [name for name in allowed if name not in ("seed", "compression_ratio", "entries_per_head")]
        values = {}
    else:
        allowed, values = [], {}
    for key, value in options.items():
        name, _, rest = key.partition(".")
        if name not in allowed:
            raise ValueError(
                f"options of {type(owner).__name__} must be among {allowed} (a sweep sets "
                f"budget and seed itself), got {key!r}"
            )
        current = values[name] if name in values else getattr(owner, name)
        if not rest and not isinstance(owner, list):
            _check_value(type(owner), name, value)
        values[name] = _changed(current, {rest: value}) if rest else value
    return list(values.values()) if isinstance(owner, list) else replace(cast(Any, owner), **values)


def _check_value(owner: type, name: str, value: Any) -> None:
    """kvpress' presses check few of their fields; all of its numbers are counts, shares or positions."""
    hint = get_type_hints(owner)[name]
    if not fits(value, hint):
        raise ValueError(f"options of {owner.__name__} must fit: {name} must be {said(hint)}, got {value!r}")
    if owner.__module__.startswith("kvpress.") and isinstance(value, int | float) and value < 0:
        raise ValueError(f"options of {owner.__name__} must fit: {name} must not be negative, got {value!r}")
