"""Compiled models: ``torch.compile`` does not look for hooks that come later, so it is put aside for a while."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.Lock()


class _Stance:
    """``torch.compile``'s stance while there are blocks, of whatever thread."""

    def __init__(self) -> None:
        self.blocks = 0
        self.stance: Any = None

    def enter(self) -> None:
        with _LOCK:
            if not self.blocks:
                self.stance = torch.compiler.set_stance("force_eager")
            self.blocks += 1

    def leave(self) -> None:
        with _LOCK:
            self.blocks -= 1
            if not self.blocks:
                self.stance.__exit__(None, None, None)


_STANCE = _Stance()


@contextmanager
def uncompiled() -> Iterator[None]:
    """Inside the block everything compiled runs as it was written; blocks may overlap in any order."""
    _STANCE.enter()
    try:
        yield
    finally:
        _STANCE.leave()
