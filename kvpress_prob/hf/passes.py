"""A second pass of the model over a finished prefill, with the attention of its full-attention layers in the caller's
hands.

The pass reads the prefill's cache and adds nothing to it: what a layer would hold lives while that layer attends, so
beyond the cache a pass needs the tensors of one layer. Rotary frequencies are those of the context's keys, however far
the pass reaches.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from kvpress_prob.hf.borrowed import borrowed
from kvpress_prob.hf.observing import AttentionInputs, observed_here
from kvpress_prob.hf.prefill import Prefill
from kvpress_prob.hf.supported import decoder_of

Attend = Callable[[int, AttentionInputs, Tensor, Tensor], Tensor]
"""(layer index, attention inputs, keys [b hkv s d], values [b hkv s dv]) -> attention output [b hq n dv]."""


def second_pass(prefill: Prefill, input_ids: Tensor, attend: Attend) -> None:
    """Run the decoder over ``input_ids`` as if they followed the prefill's context.

    Parameters
    ----------
    prefill : Prefill
        Its cache is read and not changed.
    input_ids : Int[Tensor, "b n"]
    attend : callable
        Computes the attention of every full-attention layer; keys and values are the context's, then the new tokens'.
    """
    decoder = decoder_of(prefill.model)
    b, n = input_ids.shape
    valid = prefill.valid
    mask = None if valid.all() else torch.cat((valid, valid.new_ones(b, n)), 1)
    positions = prefill.next_position.unsqueeze(-1) + torch.arange(n, device=input_ids.device)
    modules = [layer.self_attn for layer in decoder.layers]
    with torch.no_grad(), observed_here(modules, _Pass(attend)), prefill.rotary.held():
        decoder(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=_ReadOnly(prefill.cache),
            use_cache=True,
        )


def next_logits(prefill: Prefill) -> Tensor:
    """Logits [b v] of the token after the context, as the model itself makes them.

    What a model does between its decoder and its logits (scaling, a softcap, a projection) is its own affair: it runs
    on one token more, and in its decoder's place answers the hidden state that the prefill ended with.
    """
    model: Any = prefill.model
    here = threading.get_ident()

    def answer(module: nn.Module, args: tuple, output: Any) -> Any:
        if threading.get_ident() == here:
            output.last_hidden_state = prefill.last_hidden_state.unsqueeze(1)
        return output

    token = torch.zeros(len(prefill.valid), 1, dtype=torch.long, device=prefill.valid.device)
    hook = decoder_of(model).register_forward_hook(answer)
    try:
        return one_more(prefill, token, _ReadOnly(prefill.cache), prefill.next_position)
    finally:
        hook.remove()


def one_more(prefill: Prefill, token: Tensor, cache: Any, position: Tensor) -> Tensor:
    """Logits [b v] after one more token [b 1] at its position [b]; rotary frequencies are those of the context."""
    model: Any = prefill.model
    with torch.no_grad(), prefill.rotary.held(), _objects(model):
        output = model(
            input_ids=token,
            past_key_values=cache,
            position_ids=position.unsqueeze(-1),
            use_cache=True,
            return_dict=True,
        )
    return output.logits[:, -1]


@contextmanager
def _objects(model: Any) -> Iterator[None]:
    """Outputs are objects inside the block, whatever the configuration says."""
    with ExitStack() as stack:
        for config in {id(it): it for it in (model.config, decoder_of(model).config)}.values():
            stack.enter_context(borrowed(config, "return_dict", True))
        yield


def continued(cache: Any) -> DynamicCache:
    """A cache that starts from the same tensors and grows by its own tokens alone."""
    own: list[CacheLayerMixin] = [
        _Continuation(layer) if type(layer) is DynamicLayer else copy.copy(layer) for layer in cache.layers
    ]
    scratch = DynamicCache()
    scratch.layers = own
    return scratch


class _Continuation(DynamicLayer):
    """Tokens after those of another layer, which is not copied but while this one attends."""

    def __init__(self, context: DynamicLayer):
        super().__init__()
        self.context = context

    def update(
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, cache_kwargs)
        before = cast(Tensor, self.context.keys), cast(Tensor, self.context.values)
        return torch.cat((before[0], keys), 2), torch.cat((before[1], values), 2)

    def get_seq_length(self) -> int:
        return self.context.get_seq_length() + super().get_seq_length()


class _ReadOnly(DynamicCache):
    """Answers with what a layer of ``cache`` would hold, and keeps nothing of it."""

    def __init__(self, cache: Any):
        super().__init__()
        self.layers = cache.layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[Tensor, Tensor]:
        return copy.copy(self.layers[layer_idx]).update(key_states, value_states, cache_kwargs)


def batch_row(prefill: Prefill, row: int) -> Prefill:
    """One batch row of a prefill as if it had been alone, without its padding; its tensors are views."""
    padding = int((~prefill.valid[row]).sum())
    cache = _copied(prefill.cache)
    for layer in cache.layers:
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        # A sliding-window layer may have dropped some of the padding, or all of it, already.
        drop = max(padding - (layer.get_seq_length() - keys.shape[2]), 0)
        layer.keys, layer.values = keys[row : row + 1, :, drop:], values[row : row + 1, :, drop:]
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= padding
    ids = prefill.input_ids
    return replace(
        prefill,
        cache=cache,
        valid=prefill.valid[row : row + 1, padding:],
        next_position=prefill.next_position[row : row + 1],
        input_ids=None if ids is None else ids[row : row + 1, padding:],
        last_hidden_state=prefill.last_hidden_state[row : row + 1],
    )


def repeated(prefill: Prefill, times: int) -> Prefill:
    """A prefill of one batch row as a batch of equal rows; its tensors are views."""
    cache = _copied(prefill.cache)
    for layer in cache.layers:
        keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)
        layer.keys, layer.values = keys.expand(times, -1, -1, -1), values.expand(times, -1, -1, -1)
    ids = prefill.input_ids
    return replace(
        prefill,
        cache=cache,
        valid=prefill.valid.expand(times, -1),
        next_position=prefill.next_position.expand(times),
        input_ids=None if ids is None else ids.expand(times, -1),
        last_hidden_state=prefill.last_hidden_state.expand(times, -1),
    )


def _copied(cache: Any) -> DynamicCache:
    """Other layers of the same tensors."""
    copies = DynamicCache()
    copies.layers = [copy.copy(layer) for layer in cache.layers]
    return copies


class _Pass:
    """Hands the attention of full-attention layers to ``attend``."""

    def __init__(self, attend: Attend):
        self.attend_layer = attend

    def attend(
        self, module: nn.Module, inputs: AttentionInputs | None, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor | None:
        if inputs is None:
            return None
        return self.attend_layer(int(module.layer_idx), inputs, key, value)  # pyright: ignore[reportArgumentType]
