"""Checks of plain values that people and programs write into files: their types, their ranges, what they become."""

import math
import re
from collections.abc import Sequence
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

LONGEST_NAME = 80
"""Characters of what begins a folder's name."""
SEEDS = 2**63
"""Seeds are below."""
WHOLE = 2**63
"""Integers are below, and above its negative."""


def fits(value: Any, hint: Any) -> bool:
    """Whether a value has the type of an annotation; integers are floats, booleans are no numbers, floats are finite,
    integers have 64 bits.

    Annotations that cannot be checked, such as callables', fit everything.
    """
    origin, options = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (UnionType, Union):
        return any(fits(value, option) for option in options)
    if origin is Literal:
        return value in options
    if origin is list:
        return isinstance(value, list) and all(fits(item, options[0]) for item in value)
    if hint is None:
        return value is None
    if hint is float:
        return is_number(value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < WHOLE
    if isinstance(hint, type) and origin is None and not getattr(hint, "_is_protocol", False):
        return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    return origin is not Sequence or (isinstance(value, Sequence) and not isinstance(value, str))


def is_number(value: Any) -> bool:
    """Whether a value is a number, no boolean, that a float can hold."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def said(hint: Any) -> str:
    """An annotation as a message says it."""
    text = hint.__name__ if isinstance(hint, type) and get_origin(hint) is None else str(hint).replace("typing.", "")
    return re.sub(r"\bint\b", "int of 64 bits", text)


def check_name(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless the value can begin a folder's name on any file system."""
    inside = isinstance(value, str) and value.isascii() and all(c.isalnum() or c in "._-+=" for c in value)
    if not inside or not value[:1].isalnum() or len(value) > LONGEST_NAME:
        raise ValueError(
            f"{name} must be at most {LONGEST_NAME} ASCII letters, digits and '._-+=', beginning with a letter or a "
            f"digit, because it names a folder, got {value!r}"
        )


def check_text(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless the value is text that can be shown on a line and saved."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"{name} must be printable text, got {value!r}")


def check_count(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless the value is an integer of at least 1."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, got {value!r}")
    if not 1 <= value < WHOLE:
        raise ValueError(f"{name} must be at least 1{' and below 2^63' if value > 1 else ''}, got {value}")


def check_ratios(values: Any, *, zero: bool) -> None:
    """Raise ``ValueError`` unless the values are different compression ratios, 0 among them only if ``zero``."""
    check_list("ratios", values)
    for value in values:
        if not is_number(value) or not 0 <= value < 1 or (value == 0 and not zero):
            raise ValueError(f"ratios must be in {'[' if zero else '('}0, 1), got {value!r}")


def check_seeds(name: str, values: Any) -> None:
    """Raise ``ValueError`` unless the values are different integers that every random generator takes."""
    check_list(name, values)
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < SEEDS:
            raise ValueError(f"{name} must be an integer in [0, 2^63), got {value!r}")


def check_list(name: str, values: Any) -> None:
    """Raise ``ValueError`` unless the value is a list of at least one value, all different."""
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {values!r}")
    if not values:
        raise ValueError(f"{name} must not be empty")
    for place, value in enumerate(values):
        if value in values[:place]:
            raise ValueError(f"{name} must be different from each other, got {value!r} twice")


def check_choices(name: str, values: Sequence[Any], allowed: Sequence[str]) -> None:
    """Raise ``ValueError`` unless all values are among the allowed."""
    for value in values:
        if value not in allowed:
            raise ValueError(f"{name} must be among {list(allowed)}, got {value!r}")
