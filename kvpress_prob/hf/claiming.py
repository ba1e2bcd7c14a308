"""One block at a time watches a model's attention."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn

from kvpress_prob.hf.attention import SUPPORTED_ATTENTION
from kvpress_prob.hf.enclosing import is_enclosed
from kvpress_prob.hf.observing import configured_attention

_LOCK = threading.Lock()
_OPEN: WeakSet[nn.Module] = WeakSet()
"""Attention modules of the models inside a block."""


@contextmanager
def claimed(decoder: Any) -> Iterator[None]:
    """Let no other block watch the attention of a model for the length of this one.

    Raises
    ------
    ValueError
        If another does, or if the model attends with something else than sdpa or eager.
    """
    modules = [layer.self_attn for layer in decoder.layers]
    with _LOCK:
        if any(module in _OPEN for module in modules):
            raise ValueError("model is already inside a `with press(model)` block of a probabilistic press")
        if is_enclosed(decoder):
            raise ValueError("model is already inside a `with press(model)` block that encloses its prefills")
        base = configured_attention(modules[0])
        if base not in SUPPORTED_ATTENTION:
            raise ValueError(f"model must have attn_implementation in {SUPPORTED_ATTENTION}, got {base!r}")
        _OPEN.update(modules)
    try:
        yield
    finally:
        with _LOCK:
            _OPEN.difference_update(modules)
