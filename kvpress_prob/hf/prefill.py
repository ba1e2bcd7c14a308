"""Watching a model's prefills: what every layer's attention got, and when the last layer is done.

Inside ``with watch_prefills(model, start)``, each forward pass that begins on an empty cache is a prefill. Its layers
are shown to the object that ``start()`` returned, one call after each full-attention layer, then one call at the end,
when the cache is dense and complete.

The queries are the very tensors that the model's attention module handed to its attention function: for the length of
the block the model attends through a function registered under a name of our own, which notes the query and calls the
function that was configured before (transformers' own extension point; attention and mask are registered together). On
exit the model is as it was.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from kvpress.utils import get_prerope_query_states
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvpress_prob.hf.attention import SUPPORTED_ATTENTION
from kvpress_prob.hf.cache import check_cache

_NAME = "kvpress_prob_{}"


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
class LayerPrefill:
    """One full-attention layer of a prefill: the arguments of kvpress' ``ScorerPress.score``.

    ``kwargs`` holds the layer's ``AttentionInputs`` as ``"attention_inputs"`` and the validity [b, t] of its tokens as
    ``"valid"``.
    """

    module: nn.Module
    hidden_states: Tensor
    keys: Tensor
    values: Tensor
    attentions: Tensor | None
    kwargs: dict[str, Any]


@dataclass(frozen=True)
class Prefill:
    """A finished prefill.

    Attributes
    ----------
    model : PreTrainedModel
    cache : Cache
        Dense, as the model left it.
    layers : list of int
        Indices of the full-attention layers.
    valid : Bool[Tensor, "b t"]
        False for left padding.
    input_ids : Int[Tensor, "b t"] or None
        None when the model was called with embeddings.
    """

    model: PreTrainedModel
    cache: Cache
    layers: list[int]
    valid: Tensor
    input_ids: Tensor | None


class PrefillWatcher(Protocol):
    """State of one prefill."""

    def layer(self, layer: LayerPrefill) -> None: ...

    def end(self, prefill: Prefill) -> None: ...


class _Recorder:
    """Holds each attention module's inputs between its attention call and its forward hook; None for sliding-window
    layers."""

    def __init__(self) -> None:
        self.inputs: dict[nn.Module, AttentionInputs | None] = {}


_RECORDERS: WeakKeyDictionary[nn.Module, _Recorder] = WeakKeyDictionary()
"""Attention modules of the models that are being watched right now."""


def decoder_of(model: PreTrainedModel) -> Any:
    """The module whose ``layers`` hold a ``self_attn`` each; ``TypeError`` for any other architecture."""
    base = getattr(model, "model", None)
    decoder = getattr(base, "language_model", base)
    layers = getattr(decoder, "layers", None)
    if not layers or not all(hasattr(getattr(layer, "self_attn", None), "layer_idx") for layer in layers):
        raise TypeError(
            "model must be a decoder-only language model with model.layers[i].self_attn.layer_idx, "
            f"got {type(model).__name__}"
        )
    if any(hasattr(layer.self_attn, "sinks") for layer in layers):
        raise TypeError(f"model must not have learned attention sinks, got {type(model).__name__}")
    return decoder


@contextmanager
def watch_prefills(model: PreTrainedModel, start: Callable[[], PrefillWatcher]) -> Iterator[None]:
    """Show every prefill inside the block to a new ``start()``.

    Raises
    ------
    TypeError
        For a model whose layers are not found, at once; for a cache that cannot be compressed, before the model runs.
    ValueError
        If the model attends with something else than sdpa or eager, or is being watched already.
    """
    decoder = decoder_of(model)
    modules = [layer.self_attn for layer in decoder.layers]
    base = modules[0].config._attn_implementation
    if any(module in _RECORDERS for module in modules):
        raise ValueError("model is already inside a `with press(model)` block of a probabilistic press")
    if base not in SUPPORTED_ATTENTION:
        raise ValueError(f"model must have attn_implementation in {SUPPORTED_ATTENTION}, got {base!r}")
    recorder = _Recorder()
    session = _Session(model, decoder, recorder, start)
    with ExitStack() as stack:
        for module in modules:
            _RECORDERS[module] = recorder
            stack.callback(_RECORDERS.pop, module, None)
            stack.callback(module.register_forward_hook(session.after_attention, with_kwargs=True).remove)
            if not hasattr(module, "rotary_emb"):
                # Where kvpress' scorers look for it.
                module.rotary_emb = decoder.rotary_emb
                stack.callback(delattr, module, "rotary_emb")
        stack.callback(decoder.register_forward_pre_hook(session.before_model, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(session.after_model, with_kwargs=True).remove)
        stack.enter_context(_attention_name(modules, base))
        yield


@dataclass
class _Running:
    """A prefill between its first and its last layer."""

    watcher: PrefillWatcher
    valid: Tensor
    input_ids: Tensor | None
    layers: list[int]


class _Session:
    """The hooks of one ``watch_prefills`` block."""

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, recorder: _Recorder, start: Callable[[], PrefillWatcher]
    ) -> None:
        self.model = model
        self.recorder = recorder
        self.start = start
        self.signature = inspect.signature(decoder.forward)
        self.running: _Running | None = None

    def before_model(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decide whether this pass is a prefill; refuse what cannot be compressed before anything has run."""
        self.running = None
        given = self.signature.bind_partial(*args, **kwargs).arguments
        given = {**given.pop("kwargs", {}), **given}
        cache = given.get("past_key_values")
        check_cache(cache)
        if cache is None and not given.get("use_cache", self.model.config.get_text_config().use_cache):
            raise ValueError("use_cache must be True inside `with press(model)`: without a cache nothing is compressed")
        if cache is not None and cache.get_seq_length() > 0:
            return
        ids = given.get("input_ids")
        valid = _left_padded(given.get("attention_mask"), given["inputs_embeds"] if ids is None else ids)
        self.recorder.inputs.clear()
        self.running = _Running(self.start(), valid, ids, [])

    def after_attention(self, module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        """Show a full-attention layer of a prefill to the watcher."""
        running = self.running
        if running is None:
            return
        if module not in self.recorder.inputs:
            raise TypeError(f"{type(module).__name__} does not use transformers' attention interface")
        inputs = self.recorder.inputs.pop(module)
        if inputs is None:
            return
        index = cast(int, module.layer_idx)
        cache_layer = kwargs["past_key_values"].layers[index]
        tokens = running.valid.shape[1]
        if cache_layer.keys.shape[2] != tokens:
            raise ValueError(
                f"layer {index} must hold all {tokens} tokens of the prefill, got {cache_layer.keys.shape[2]}: "
                "another press has compressed it"
            )
        running.layers.append(index)
        layer = LayerPrefill(
            module,
            kwargs["hidden_states"] if "hidden_states" in kwargs else args[0],
            cache_layer.keys,
            cache_layer.values,
            output[1],
            {**kwargs, "attention_inputs": inputs, **({} if running.valid.all() else {"valid": running.valid})},
        )
        with torch.no_grad():
            running.watcher.layer(layer)

    def after_model(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Hand the finished prefill to the watcher."""
        running, self.running = self.running, None
        if running is None:
            return
        prefill = Prefill(self.model, output.past_key_values, running.layers, running.valid, running.input_ids)
        with torch.no_grad():
            running.watcher.end(prefill)


def _left_padded(attention_mask: Tensor | None, inputs: Tensor) -> Tensor:
    """Validity [b, t] of the prefill's tokens; only left padding is understood."""
    shape = inputs.shape[:2]
    if attention_mask is None:
        return torch.ones(shape, dtype=torch.bool, device=inputs.device)
    if attention_mask.ndim != 2 or tuple(attention_mask.shape) != tuple(shape):
        raise NotImplementedError(
            f"attention_mask of a prefill must have shape {tuple(shape)}, got {tuple(attention_mask.shape)}"
        )
    valid = attention_mask.bool()
    if not valid[:, -1].all() or (valid[:, :-1] & ~valid[:, 1:]).any():
        raise NotImplementedError("attention_mask of a prefill must be left padding: zeros, then ones, in every row")
    return valid


@contextmanager
def _attention_name(modules: list[Any], base: str) -> Iterator[None]:
    """Let the modules' configuration name the recording function for the length of the block."""
    name = _NAME.format(base)
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(_record_and_attend, base))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    configs = {id(module.config): module.config for module in modules}.values()
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config in configs:
            config._attn_implementation = base


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
    recorder = _RECORDERS.get(module)
    if recorder is not None:
        recorder.inputs[module] = None if _is_sliding(module, kwargs) else _attention_inputs(query, kwargs)
    if base == "eager":  # not a registered function: every model file has its own
        attend = sys.modules[type(module).__module__].eager_attention_forward
    else:
        attend = ALL_ATTENTION_FUNCTIONS[base]
    return attend(module, query, key, value, attention_mask, **kwargs)


def _attention_inputs(query: Tensor, kwargs: dict[str, Any]) -> AttentionInputs:
    scaling = kwargs.get("scaling")
    return AttentionInputs(query, query.shape[-1] ** -0.5 if scaling is None else scaling, kwargs.get("softcap"))


def _is_sliding(module: Any, kwargs: dict[str, Any]) -> bool:
    layer_types = getattr(module.config, "layer_types", None)
    kind = layer_types[module.layer_idx] if layer_types else "full_attention"
    return kwargs.get("sliding_window") is not None or kind in ("sliding_attention", "chunked_attention")


def attention_inputs(module: Any, hidden_states: Tensor, kwargs: dict[str, Any]) -> AttentionInputs:
    """The layer's attention inputs, recorded by ``watch_prefills``, or computed again as kvpress' own scorers do.

    The second way serves when a scorer runs inside another kvpress press; it covers the architectures that kvpress
    covers.
    """
    if "attention_inputs" in kwargs:
        return kwargs["attention_inputs"]
    query = get_prerope_query_states(module, hidden_states)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    cos, sin = kwargs["position_embeddings"]
    return AttentionInputs(
        rotate(query, query, cos, sin)[0], module.scaling, getattr(module, "attn_logit_softcapping", None)
    )
