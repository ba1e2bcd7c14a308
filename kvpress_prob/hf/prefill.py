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
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
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

    @property
    def inputs(self) -> AttentionInputs:
        """What the module handed to its attention function."""
        return attention_inputs(self.module, self.hidden_states, self.kwargs)

    @property
    def valid(self) -> Tensor | None:
        """Validity [b, t] of the tokens; None when nothing is padding."""
        return self.kwargs.get("valid")


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
    next_position : Int[Tensor, "b"]
        Position of the token after the context.
    input_ids : Int[Tensor, "b t"] or None
        None when the model was called with embeddings.
    last_hidden_state : Float[Tensor, "b hidden"]
        The decoder's output for the last token of the context.
    """

    model: PreTrainedModel
    cache: Cache
    layers: list[int]
    valid: Tensor
    next_position: Tensor
    input_ids: Tensor | None
    last_hidden_state: Tensor


class PrefillWatcher(Protocol):
    """State of one prefill."""

    def layer(self, layer: LayerPrefill) -> None: ...

    def end(self, prefill: Prefill) -> None: ...


class AttentionObserver(Protocol):
    """Sees the attention of the modules that it watches."""

    def attend(
        self, module: nn.Module, inputs: AttentionInputs | None, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor | None:
        """Attention output [b hq n dv], or None to attend as configured. ``inputs`` is None for a sliding-window
        layer."""
        ...


_WATCHED: WeakKeyDictionary[nn.Module, AttentionObserver] = WeakKeyDictionary()
"""Attention modules of the models that are being watched right now."""
_ENTRY = threading.Lock()
_OF_THREAD = threading.local()
"""``observers``: what takes the place of ``_WATCHED`` in one thread."""


def decoder_of(model: PreTrainedModel) -> Any:
    """The module whose ``layers`` hold a ``self_attn`` each.

    Raises
    ------
    TypeError
        For an architecture that cannot be compressed, as far as its structure shows it.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a transformers PreTrainedModel, got {name}")
    base = getattr(model, "model", model)
    # Wrappers keep the decoder in different places; some models' get_decoder() returns the whole model.
    candidates = (getattr(base, "language_model", base), model.get_decoder())
    decoder, modules = next(((it, found) for it in candidates if (found := _attention_modules(it))), (None, []))
    if decoder is None or model.config.is_encoder_decoder:
        raise TypeError(
            "model must be a decoder-only language model whose layers[i].self_attn use transformers' attention "
            f"interface, got {name}"
        )
    if any(hasattr(module, "sinks") for module in modules):
        raise TypeError(f"model must not have learned attention sinks, got {name}")
    if getattr(decoder.config, "num_kv_shared_layers", 0):
        raise TypeError(f"model must not share keys and values between layers, got {name}")
    return decoder


def _attention_modules(decoder: Any) -> list[Any]:
    """The self-attention of every layer, or nothing if a layer has none."""
    modules = [getattr(layer, "self_attn", None) for layer in getattr(decoder, "layers", ())]
    return modules if all(hasattr(module, "layer_idx") and hasattr(module, "config") for module in modules) else []


@contextmanager
def watch_prefills(model: PreTrainedModel, start: Callable[[], PrefillWatcher]) -> Iterator[None]:
    """Show every prefill inside the block, of whatever thread, to a new ``start()``.

    Raises
    ------
    TypeError
        For a model that cannot be compressed, at once; for a cache that cannot be, before the model runs.
    ValueError
        If the model attends with something else than sdpa or eager, or is being watched already.
    """
    decoder = decoder_of(model)
    modules = [layer.self_attn for layer in decoder.layers]
    base = configured_attention(modules[0])
    session = _Session(model, decoder, start)
    with ExitStack() as stack:
        with _ENTRY:
            if any(module in _WATCHED for module in modules):
                raise ValueError("model is already inside a `with press(model)` block of a probabilistic press")
            if base not in SUPPORTED_ATTENTION:
                raise ValueError(f"model must have attn_implementation in {SUPPORTED_ATTENTION}, got {base!r}")
            for module in modules:
                stack.callback(_WATCHED.pop, module, None)
                _WATCHED[module] = session
        for module in modules:
            stack.callback(module.register_forward_hook(session.after_attention, with_kwargs=True).remove)
            if not hasattr(module, "rotary_emb") and hasattr(decoder, "rotary_emb"):
                # Where kvpress' scorers look for it.
                module.rotary_emb = decoder.rotary_emb
                stack.callback(delattr, module, "rotary_emb")
        stack.callback(decoder.register_forward_pre_hook(session.before_model, with_kwargs=True).remove)
        stack.callback(decoder.register_forward_hook(session.after_model, with_kwargs=True).remove)
        stack.enter_context(named_attention(modules))
        yield


@dataclass
class _Running:
    """A prefill between its first and its last layer."""

    watcher: PrefillWatcher
    valid: Tensor
    next_position: Tensor
    input_ids: Tensor | None
    cache: Cache | None = None
    layers: list[int] = field(default_factory=list)
    attended: "_Attended | None" = None


@dataclass(frozen=True)
class _Attended:
    """What the attention function got, between its call and its module's forward hook."""

    module: nn.Module
    mask: Tensor | None
    inputs: AttentionInputs | None  # None for a sliding-window layer


class _Session(threading.local):
    """The hooks of one ``watch_prefills`` block. Each thread has its own running prefill, most threads none."""

    def __init__(self, model: PreTrainedModel, decoder: nn.Module, start: Callable[[], PrefillWatcher]) -> None:
        self.model = model
        self.start = start
        self.signature = inspect.signature(decoder.forward)
        self.running: _Running | None = None

    def before_model(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decide whether this pass is a prefill; refuse what cannot be compressed before anything has run."""
        self.running = None
        given = self.signature.bind_partial(*args, **kwargs).arguments
        given = {**given.pop("kwargs", {}), **given}
        cache, ids, embeds = (given.get(name) for name in ("past_key_values", "input_ids", "inputs_embeds"))
        check_cache(cache)
        use_cache = given.get("use_cache")
        if cache is None and not (self.model.config.get_text_config().use_cache if use_cache is None else use_cache):
            raise ValueError("use_cache must be True inside `with press(model)`: without a cache nothing is compressed")
        inputs = embeds if ids is None else ids
        if inputs is None or (cache is not None and cache.get_seq_length() > 0):
            return
        valid = validity(given.get("attention_mask"), inputs)
        positions = given.get("position_ids")
        last = inputs.shape[1] - 1 if positions is None else positions[..., -1]
        next_position = torch.as_tensor(last, device=inputs.device).expand(inputs.shape[0]) + 1
        self.running = _Running(self.start(), valid, next_position, ids)

    def attend(
        self, module: nn.Module, inputs: AttentionInputs | None, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> None:
        """Note what the attention function got, and let it attend."""
        if self.running is not None:
            self.running.attended = _Attended(module, mask, inputs)

    def after_attention(self, module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        """Show a full-attention layer of a prefill to the watcher."""
        running = self.running
        if running is None:
            return
        name = type(module).__name__
        attended, running.attended = running.attended, None
        if attended is None or attended.module is not module:
            raise TypeError(f"{name} does not use transformers' attention interface")
        for keyword in ("past_key_values", "attention_mask"):
            if keyword not in kwargs:
                raise TypeError(f"{name} must be called with the keyword {keyword}, got {sorted(kwargs)}")
        if attended.mask is not kwargs["attention_mask"]:
            raise TypeError(f"{name} changes its attention mask: it cannot decode over a compressed cache")
        running.cache = kwargs["past_key_values"]
        if running.cache is None:
            raise ValueError("use_cache must be True inside `with press(model)`: without a cache nothing is compressed")
        if attended.inputs is None:
            return
        index = cast(int, module.layer_idx)
        keys, values = running.cache.layers[index].keys, running.cache.layers[index].values
        running.layers.append(index)
        self._check_dense(running)
        layer = LayerPrefill(
            module,
            kwargs["hidden_states"] if "hidden_states" in kwargs else args[0],
            cast(Tensor, keys),
            cast(Tensor, values),
            output[1],
            {
                **kwargs,
                "attention_inputs": attended.inputs,
                **({} if running.valid.all() else {"valid": running.valid.to(cast(Tensor, keys).device)}),
            },
        )
        with torch.no_grad():
            running.watcher.layer(layer)

    def after_model(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Hand the finished prefill to the watcher."""
        running, self.running = self.running, None
        if running is None or running.cache is None:
            return
        self._check_dense(running)
        prefill = Prefill(
            self.model,
            running.cache,
            running.layers,
            running.valid,
            running.next_position,
            running.input_ids,
            output.last_hidden_state[:, -1],
        )
        with torch.no_grad():
            running.watcher.end(prefill)

    def _check_dense(self, running: _Running) -> None:
        """Refuse layers that another press inside the same block has pruned."""
        tokens = running.valid.shape[1]
        for index in running.layers:
            length = cast(Tensor, cast(Cache, running.cache).layers[index].keys).shape[2]
            if length != tokens:
                raise ValueError(
                    f"layer {index} must hold all {tokens} tokens of the prefill, got {length}: "
                    "another press has compressed it"
                )


def validity(attention_mask: Any, inputs: Tensor) -> Tensor:
    """Validity [b, t] of a prefill's tokens from a mask [b, t], a mask [b or 1, heads, t, t], or a dict of such masks.

    Only left padding is understood. Tokens may see more than the ones before them (images do).
    """
    b, t = inputs.shape[:2]
    if isinstance(attention_mask, dict):
        # What multimodal models hand to their language model: a mask for each kind of layer.
        attention_mask = attention_mask.get("full_attention")
    if attention_mask is None:
        return torch.ones(b, t, dtype=torch.bool, device=inputs.device)
    shape = tuple(getattr(attention_mask, "shape", ()))
    if shape == (b, t):
        valid = attention_mask.bool()
    elif len(shape) == 4 and shape[0] in (1, b) and shape[2:] == (t, t):
        seen = attention_mask if attention_mask.dtype == torch.bool else attention_mask == 0
        valid = seen[:, 0, -1].expand(b, t)
        columns = valid[:, None, None]
        causal = torch.ones(t, t, dtype=torch.bool, device=seen.device).tril()
        if (seen & ~columns).any() or (causal & columns & ~seen).any():
            raise NotImplementedError("attention_mask of a prefill must let every token see all valid ones before it")
    else:
        raise NotImplementedError(
            f"attention_mask of a prefill must have shape {(b, t)} or {(b, 1, t, t)}, got {shape or attention_mask}"
        )
    if not valid[:, -1].all() or (valid[:, :-1] & ~valid[:, 1:]).any():
        raise NotImplementedError("attention_mask of a prefill must be left padding: zeros, then ones, in every row")
    return valid


def configured_attention(module: Any) -> str:
    """Name of the attention implementation that the model was configured with."""
    return module.config._attn_implementation.removeprefix(_PREFIX)


@contextmanager
def named_attention(modules: list[Any]) -> Iterator[None]:
    """Let the modules' configuration name the recording function for the length of the block."""
    base = configured_attention(modules[0])
    name = _PREFIX + base
    if name not in ALL_ATTENTION_FUNCTIONS:
        AttentionInterface.register(name, partial(_record_and_attend, base))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[base])
    configs = {id(module.config): module.config for module in modules}.values()
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = name
        yield
    finally:
        for config, configured in zip(configs, before, strict=True):
            config._attn_implementation = configured


@contextmanager
def attention_observer(modules: list[Any], observer: "AttentionObserver") -> Iterator[None]:
    """Let ``observer`` see, and if it wants to compute, what the modules attend in this thread for the length of the
    block; whoever watches them otherwise does not. Other threads are left alone."""
    before = _observers()
    _OF_THREAD.observers = {**before, **dict.fromkeys(modules, observer)}
    try:
        with named_attention(modules):
            yield
    finally:
        _OF_THREAD.observers = before


def _observers() -> dict[nn.Module, AttentionObserver]:
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
    observer = _observers().get(module) or _WATCHED.get(module)
    if observer is not None:
        inputs = None if _is_sliding(module, kwargs) else _attention_inputs(query, kwargs, base)
        output = observer.attend(module, inputs, key, value, attention_mask)
        if output is not None:
            return output.transpose(1, 2).contiguous(), None
    attend = _eager_attention(module) if base == "eager" else ALL_ATTENTION_FUNCTIONS[base]
    return attend(module, query, key, value, attention_mask, **kwargs)


def _eager_attention(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Eager attention is not registered: every model file has its own; a subclass may live in another file."""
    for cls in type(module).__mro__:
        function = getattr(sys.modules[cls.__module__], "eager_attention_forward", None)
        if function is not None:
            return function
    raise TypeError(f"no eager_attention_forward beside {type(module).__name__}: use attn_implementation='sdpa'")


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
    """The layer's attention inputs, recorded by ``watch_prefills``, or computed again as kvpress' own scorers do.

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
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    # transformers' sdpa attention ignores a model's softcap.
    softcap = getattr(module, "attn_logit_softcapping", None) if "eager" in module.config._attn_implementation else None
    return AttentionInputs(rotate(query, query, cos, sin)[0], module.scaling, softcap)
