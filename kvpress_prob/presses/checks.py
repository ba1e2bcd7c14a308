"""Checks that presses share."""

from collections.abc import Sequence


def check_ratio(compression_ratio: float) -> None:
    """Raise ``ValueError`` unless the ratio is a number in [0, 1)."""
    if not isinstance(compression_ratio, (int, float)) or not 0 <= compression_ratio < 1:
        raise ValueError(f"compression_ratio must be a number in [0, 1), got {compression_ratio!r}")


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
    """Raise ``ValueError`` unless the value is one of the allowed."""
    if value not in allowed:
        raise ValueError(f"{name} must be one of {tuple(allowed)}, got {value!r}")
