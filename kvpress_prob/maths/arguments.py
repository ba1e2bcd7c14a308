"""Checks of numbers and choices that a user gives. numpy's numbers are numbers; True, False and fractions are not."""

import math
import numbers
from collections.abc import Collection
from fractions import Fraction
from typing import Any


def check_choice(name: str, value: Any, allowed: Collection[str]) -> None:
    """Raise ``ValueError`` unless the value is one of the allowed."""
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")


def check_flag(name: str, value: Any) -> None:
    """Raise ``TypeError`` unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def is_number(value: Any) -> bool:
    """Whether a value is a real number that torch computes with, and not NaN."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool | Fraction) and not math.isnan(value)


def check_integer(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise ``ValueError`` unless the value is an integer that is not less than ``least``, or None where it is
    optional."""
    if optional and value is None:
        return
    if not isinstance(value, numbers.Integral) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be {'None or ' if optional else ''}an integer >= {least}, got {value!r}")
    if int(value) >= 2**63:
        raise ValueError(f"{name} must be below 2^63, got {value!r}")


def check_fraction(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless the value is a number in [0, 1]."""
    if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f"{name} must be a number in [0, 1], got {value!r}")


def check_positive(name: str, value: Any) -> None:
    """Raise ``ValueError`` unless the value is a number above 0; infinity is one."""
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name} must be a number > 0, got {value!r}")


def check_ratio(compression_ratio: Any) -> None:
    """Raise ``ValueError`` unless the ratio is a number in [0, 1)."""
    if not is_number(compression_ratio) or not 0 <= compression_ratio < 1:
        raise ValueError(f"compression_ratio must be a number in [0, 1), got {compression_ratio!r}")


def check_seed(name: str, seed: Any, *, optional: bool = False) -> None:
    """Raise ``ValueError`` unless the seed is an integer that torch's generators take, or None where it is
    optional."""
    if optional and seed is None:
        return
    if not isinstance(seed, numbers.Integral) or isinstance(seed, bool) or not -(2**63) <= int(seed) < 2**64:
        wanted = f"{'None or ' if optional else ''}an integer in [-2^63, 2^64)"
        raise ValueError(f"{name} must be {wanted}, got {seed!r}")
