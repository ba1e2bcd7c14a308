"""Observing attention: what a model's attention modules hand to their attention function.

The queries are the very tensors that the attention function gets: for the length of a block the model attends through a
function registered under a name of our own, which shows the query to whoever observes the module and then calls the
function that was configured before (transformers' own extension point; attention and mask are registered together).
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from kvpress.utils import get_prerope_query_states
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpress_prob.hf.borrowed import borrow
from kvpress_prob.hf.rotary import function_beside, rotate

_PREFIX = "kvpress_prob_"


@dataclass(frozen=True)
class AttentionInputs:
    """What an attention module handed to its attention function.

    Attributes
    ----------
    query : Float[Tensor, "b hq n d"]
        After projection, norms and rotary embedding.
    scaling : float
    softcap : float or None
    """

    query: Tensor
    scaling: float
    softcap: float | None


@dataclass(frozen=True)
class Attended:
    """What the attention function got, between its call and its module's forward hook."""

    module: nn.Module
    mask: Tensor | None
    inputs: AttentionInputs | None  # None for a sliding-window layer


def checked(attended: Attended | None, module: nn.Module, kwargs: dict[str, Any]) -> tuple[Attended, Cache]:
    """What the attention function got from a module that has just run, and the cache that its forward was given.

    Raises
    ------
    TypeError
        If the module does not attend through transformers' interface, is called without the keywords that are read
        here, or changes its mask on the way.
    ValueError
        If it was given no cache.
    """
    name = type(module).__name__
    if attended is None or attended.module is not module:
        raise TypeError(f"{name} does not use transformers' attention interface")
    for keyword in ("past_key_values", "attention_mask"):
        if keyword not in kwargs:
            raise TypeError(f"{name} must be called with the keyword {keyword}, got {sorted(kwargs)}")
    if attended.mask is not kwargs["attention_mask"]:
        raise TypeError(f"{name} changes its attention mask: it cannot decode over a compressed cache")
    cache = kwargs["past_key_values"]
    if cache is None:
        raise ValueError("use_cache must be True inside `with press(model)`: without a cache nothing is compressed")
    return attended, cache


class AttentionObserver(Protocol):
    """Sees the attention of the modules that it watches."""

    def attend(
        self, module: nn.Module, inputs: AttentionInputs | None, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor | None:
        """Attention output [b hq n dv], or None to attend as configured. ``inputs`` is None for a sliding-window
        layer."""
        ...


_OBSERVERS: WeakKeyDictionary[nn.Module, tuple[AttentionObserver, ...]] = WeakKeyDictionary()
"""Who observes a module, in whatever thread it runs."""
_LOCK = threading.Lock()
_OF_THREAD = threading.local()
"""``observers``: what takes the place of ``_OBSERVERS`` in one thread."""


def configured_attention(module: Any) -> str:
    """Name of the attention implementation that the model was configured with."""
    return module.config._attn_implementation.removeprefix(_PREFIX)


@contextmanager
def _named_attention(modules: list[Any]) -> Iterator[None]:
    """Let the modules' configurations, which other models may share, name the recording function inside the block."""
    base = configured_attention(modules[0])
    name = _PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(_record_and_attend, base))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    with ExitStack() as stack:
        for config in {id(module.config): module.config for module in modules}.values():
            stack.callback(borrow(config, "_attn_implementation", name))
        yield


@contextmanager
def observed(modules: list[Any], observer: AttentionObserver) -> Iterator[None]:
    """Show ``observer`` what the modules attend, in any thread, for the length of the block."""
    try:
        with _LOCK:
            for module in modules:
                _OBSERVERS[module] = (*_OBSERVERS.get(module, ()), observer)
        with _named_attention(modules):
            yield
    finally:
        with _LOCK:
            for module in modules:
                _OBSERVERS[module] = tuple(it for it in _OBSERVERS.get(module, ()) if it is not observer)


@contextmanager
def observed_here(modules: list[Any], observer: AttentionObserver) -> Iterator[None]:
    """Show ``observer``, and nobody else, what the modules attend in this thread for the length of the block. Other
    threads are left alone."""
    before = _observers_here()
    _OF_THREAD.observers = {**before, **dict.fromkeys(modules, (observer,))}
    try:
        with _named_attention(modules):
            yield
    finally:
        _OF_THREAD.observers = before


def _observers_here() -> dict[nn.Module, tuple[AttentionObserver, ...]]:
    return getattr(_OF_THREAD, "observers", {})


def _record_and_attend(
    base: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The registered attention function: note the query, then attend as configured."""
    for observer in _observers_here().get(module) or _OBSERVERS.get(module, ()):
        inputs = None if _is_sliding(module, kwargs) else _attention_inputs(query, kwargs, base)
        output = observer.attend(module, inputs, key, value, attention_mask)
        if output is not None:
            return output.transpose(1, 2).contiguous(), None
    attend = _eager_attention(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
    return attend(module, query, key, value, attention_mask, **kwargs)


def _eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Eager attention is not registered: every model file has its own."""
    try:
        return function_beside(module, "eager_attention_forward")
    except TypeError as error:
        raise TypeError(f"{error}: use attn_implementation='sdpa'") from None


def _attention_inputs(query: Tensor, kwargs: dict[str, Any], base: str) -> AttentionInputs:
    scaling = kwargs.get("scaling")
    # transformers' sdpa attention ignores a model's softcap.
    softcap = kwargs.get("softcap") if base == "eager" else None
    return AttentionInputs(query, query.shape[-1] ** -0.5 if scaling is None else scaling, softcap)


def _is_sliding(module: Any, kwargs: dict[str, Any]) -> bool:
    layer_types = getattr(module.config, "layer_types", None)
    kind = layer_types[module.layer_idx] if layer_types else "full_attention"
    return kwargs.get("sliding_window") is not None or kind in ("sliding_attention", "chunked_attention")


def attention_inputs(module: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> AttentionInputs:
    """The layer's attention inputs, recorded while it attended, or computed again as kvpress' own scorers do.

    The second way serves when a scorer runs inside another kvpress press; it covers the architectures that kvpress
    covers.
    """
    if "attention_inputs" in kwargs:
        return kwargs["attention_inputs"]
    cos, sin = kwargs["position_embeddings"]
    positions, tokens = cos.shape[1], hidden_states.shape[1]
    if positions not in (1, tokens):  # one while decoding: recent queries are asked again at the newest position
        raise ValueError(f"position_embeddings must cover the {tokens} tokens of hidden_states, got {positions}")
    query = get_prerope_query_states(module, hidden_states)
    # transformers' sdpa attention ignores a model's softcap.
    softcap = getattr(module, "attn_logit_softcapping", None) if "eager" in module.config._attn_implementation else None
    return AttentionInputs(rotate(module, query, cos, sin), module.scaling, softcap)
