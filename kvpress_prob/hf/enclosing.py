"""A block of one's own around every prefill of a model, and the eviction of what somebody wants hidden.

Some kvpress presses finish their work when their block ends, not when the prefill does (KVzip). ``enclosed_prefills``
opens a block of theirs for each prefill and closes it behind the last layer, so that the cache is compressed before
anything else runs, whether decoding comes inside or after the outer block. For its length the decoder's ``forward`` is
ours, as it is KVzip's inside KVzip's block; on exit the model is as it was.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from kvpress_prob.hf.compiled import uncompiled
from kvpress_prob.hf.packing import compress_layer
from kvpress_prob.hf.rotary import RotaryState
from kvpress_prob.hf.supported import check_cache, decoder_of
from kvpress_prob.hf.validity import token_validity

_ENCLOSED: WeakSet[nn.Module] = WeakSet()
"""Decoders whose prefills are being enclosed right now."""
HiddenEntries = dict[int, tuple[Tensor, Tensor, Tensor]]
"""Per layer, entries that attention is asked to hide: batch rows, KV heads and positions."""


@contextmanager
def enclosed_prefills(
    model: PreTrainedModel,
    block: Callable[[], AbstractContextManager[Any]],
    end: Callable[[Cache, Tensor], None],
    later: Callable[[int, int], None],
) -> Iterator[None]:
    """Run every prefill, a forward pass on an empty cache, inside a block of its own.

    Parameters
    ----------
    model : PreTrainedModel
    block : callable
        Makes the block of one prefill. Inside it the decoder's ``forward`` does what the model's own does.
    end : callable
        Called after each block, without gradients, with the prefill's cache and the validity [b, t] of its tokens.
    later : callable
        Called with the number of tokens of any other pass, and of those that the cache holds already.

    Raises
    ------
    TypeError, ValueError
        For a model that is inside such a block already; for a call or a cache that cannot be compressed, before the
        model runs.
    """
    decoder = decoder_of(model)
    original = decoder.forward
    if decoder in _ENCLOSED:
        raise ValueError("model is already inside a `with press(model)` block that encloses its prefills")
    signature = inspect.signature(original)
    here = threading.local()  # ``enclosed``: a prefill of this thread is in its block

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if getattr(here, "enclosed", False):
            return original(*args, **kwargs)
        given = signature.bind_partial(*args, **kwargs).arguments
        given = {**given.pop("kwargs", {}), **given}
        inputs = given.get("input_ids") if given.get("input_ids") is not None else given.get("inputs_embeds")
        cache = given.get("past_key_values")
        held = 0 if cache is None else cache.get_seq_length()
        if inputs is None or held:
            if inputs is not None:
                later(inputs.shape[1], held)
            return original(*args, **kwargs)
        check_cache(cache)
        use_cache = given.get("use_cache")
        if cache is None:
            if not (model.config.get_text_config().use_cache if use_cache is None else use_cache):
                raise ValueError("use_cache must be True inside `with press(model)`: there is no cache to compress")
            cache = given["past_key_values"] = DynamicCache(config=decoder.config)
        valid = token_validity(given.get("attention_mask"), inputs)
        with _own_attributes(decoder), _rotary_of_this_pass(decoder):
            here.enclosed = True
            try:
                with block():
                    output = decoder.forward(**given)
            finally:
                here.enclosed = False
        with torch.no_grad():
            end(cache, valid)
        return output

    with _own_attributes(decoder), uncompiled(), RotaryState.of(decoder).kept(), _one_thread_at_a_time(decoder):
        decoder.forward = forward
        _ENCLOSED.add(decoder)
        try:
            yield
        finally:
            _ENCLOSED.discard(decoder)


@contextmanager
def _rotary_of_this_pass(decoder: Any) -> Iterator[None]:
    """Afterwards the rotary frequencies are those that the first pass inside went by, whatever a scorer or a second
    pass asked for."""
    own, first = RotaryState.of(decoder), []
    note = decoder.layers[0].register_forward_pre_hook(lambda *_: None if first else first.append(own.now()))
    try:
        yield
    finally:
        note.remove()
        for state in first:
            state.restore()


@contextmanager
def _one_thread_at_a_time(decoder: nn.Module) -> Iterator[None]:
    """While one thread's prefill is enclosed, its block is on the model, for every thread that calls it."""
    lock = threading.RLock()

    def begin(*_: Any) -> None:
        lock.acquire()

    def end(*_: Any) -> None:
        lock.release()

    hooks = [
        decoder.register_forward_pre_hook(begin, prepend=True),
        decoder.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def is_enclosed(decoder: nn.Module) -> bool:
    """Whether a decoder's prefills are being enclosed right now."""
    return decoder in _ENCLOSED


@contextmanager
def _own_attributes(decoder: Any) -> Iterator[None]:
    """Restore on exit what kvpress' presses change on a model and leave there: the decoder's ``forward`` and the rotary
    embedding of its attention modules."""
    forward = vars(decoder).get("forward")
    bare = [layer.self_attn for layer in decoder.layers if not hasattr(layer.self_attn, "rotary_emb")]
    try:
        yield
    finally:
        if forward is not None:
            decoder.forward = forward
        elif "forward" in vars(decoder):
            del decoder.forward
        for module in bare:
            if hasattr(module, "rotary_emb"):
                del module.rotary_emb


def full_attention_layers(model: PreTrainedModel) -> list[int]:
    """Indices of the layers without a sliding window, by the model's configuration."""
    config = decoder_of(model).config
    modules = [layer.self_attn for layer in decoder_of(model).layers]
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if getattr(config, "sliding_window", None) is None else "sliding"] * len(modules)
    return [module.layer_idx for module in modules if kinds[module.layer_idx] == "full_attention"]


def take_hidden(modules: list[Any]) -> HiddenEntries:
    """Collect what kvpress' attention is asked to hide in these modules, and ask no more."""
    hidden: HiddenEntries = {}
    for module in modules:
        indices = getattr(module, "masked_key_indices", None)
        if indices is not None:
            module.masked_key_indices = None
            if len(indices[0]):
                hidden[module.layer_idx] = tuple(indices)
    return hidden


def evict_hidden(cache: Cache, layers: list[int], hidden: HiddenEntries, valid: Tensor) -> Tensor:
    """Evict hidden entries and padding; what is left has weight 1.

    Parameters
    ----------
    cache : Cache
        Changed in place.
    layers : list of int
        Layers to pack, whether or not they hide anything.
    hidden : HiddenEntries
        Entries of these layers; one may be named twice.
    valid : Bool[Tensor, "b t"]
        False for left padding.

    Returns
    -------
    Int[Tensor, "layers b hkv"]
        Kept entries, on the CPU.
    """
    padding = (~valid).sum(-1).tolist()
    counts = []
    for layer in layers:
        keys = cast(Tensor, cache.layers[layer].keys)
        kept = valid.to(keys.device).unsqueeze(1).repeat(1, keys.shape[1], 1)
        if layer in hidden:
            kept[tuple(part.to(keys.device) for part in hidden[layer])] = False
        counts.append(kept.sum(-1).cpu())
        compress_layer(cache, layer, kept, torch.zeros(kept.shape, dtype=torch.float32, device=kept.device), padding)
    return torch.stack(counts)
