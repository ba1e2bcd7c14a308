"""Attributes of others' objects (an attention's name, a scorer's ratio), changed for the length of blocks that may
overlap in any order: the first block notes what was there, the last one to end puts it back."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

_ABSENT = object()
_LOCK = threading.Lock()


@dataclass
class _Loan:
    owner: Any
    before: Any
    blocks: int = 0


_LOANS: dict[tuple[int, str], _Loan] = {}
"""By identity of the owner, which a loan keeps alive, and attribute."""


def borrow(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; the result, to be called once, puts back what was there before the first loan of it."""
    with _LOCK:
        loan = _LOANS.setdefault((id(owner), name), _Loan(owner, getattr(owner, name, _ABSENT)))
        loan.blocks += 1
        setattr(owner, name, value)
    return partial(_give_back, owner, name)


def _give_back(owner: Any, name: str) -> None:
    with _LOCK:
        loan = _LOANS[id(owner), name]
        loan.blocks -= 1
        if loan.blocks:
            return
        del _LOANS[id(owner), name]
        if loan.before is not _ABSENT:
            setattr(owner, name, loan.before)
        elif hasattr(owner, name):
            delattr(owner, name)


@contextmanager
def borrowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute's value for the length of the block."""
    give_back = borrow(owner, name, value)
    try:
        yield
    finally:
        give_back()
