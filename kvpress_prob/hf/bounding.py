"""Watching every pass of a model over caches that are bounded: each layer after its attention, the cache at the end.

A long call is split into passes here too, so that it never needs more than a chunk beyond the budget: for the length of
the block the decoder's ``forward`` is one that calls the decoder's own, chunk after chunk.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import Cache, DynamicCache, PreTrainedModel

from kvpress_prob.hf.attention import RaggedKeys
from kvpress_prob.hf.budget import CacheBudget, Progress
from kvpress_prob.hf.cache import RaggedLayer
from kvpress_prob.hf.claiming import claimed
from kvpress_prob.hf.compiled import uncompiled
from kvpress_prob.hf.masks import check_padding
from kvpress_prob.hf.observing import Attended, AttentionInputs, checked, observed
from kvpress_prob.hf.packing import compress_layer
from kvpress_prob.hf.pool import Pool, PoolSettings
from kvpress_prob.hf.prefill import LayerPrefill
from kvpress_prob.hf.rotary import RotaryState, reachable_rotary
from kvpress_prob.hf.splitting import pieces
from kvpress_prob.hf.supported import check_cache, decoder_of
from kvpress_prob.hf.validity import validity_after


class PassWatcher(Protocol):
    """State of one pass."""

    def settings(self, known: PoolSettings | None) -> PoolSettings:
        """Settings of the cache's pool, given those of the pool that it has; before the model runs."""
        ...

    def layer(self, layer: RaggedLayer, new: LayerPrefill) -> None:
        """A full-attention layer after its attention, its new tokens included; ``new`` has the pass' tokens only."""
        ...

    def end(self, model: PreTrainedModel, cache: Cache, layers: list[RaggedLayer], tokens: int) -> None:
        """All layers have run."""
        ...


@contextmanager
def bound_passes(model: PreTrainedModel, start: Callable[[], PassWatcher], budget: CacheBudget) -> Iterator[None]:
    """Show every pass inside the block to a new ``start()``, calls of more than ``budget.chunk_size`` tokens in chunks.

    Raises
    ------
    TypeError, ValueError
        As ``watch_prefills``.
    """
    decoder = decoder_of(model)
    modules = [layer.self_attn for layer in decoder.layers]
    session = _Session(model, decoder, start, budget)
    with claimed(decoder), uncompiled(), ExitStack() as on_model:
        on_model.enter_context(RotaryState.of(decoder).kept())
        on_model.enter_context(reachable_rotary(decoder))
        for module in modules:
            on_model.callback(module.register_forward_hook(session.after_attention, with_kwargs=True).remove)
        on_model.enter_context(observed(modules, session))
        on_model.enter_context(_forward(decoder, session.forward))
        yield


@contextmanager
def _forward(decoder: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Give the decoder, and no other object of its class, another ``forward`` for the length of the block."""
    own = vars(decoder).get("forward")
    decoder.forward = forward
    try:
        yield
    finally:
        del decoder.forward
        if own is not None:
            decoder.forward = own


@dataclass
class _Pass:
    """A pass between its first and its last layer."""

    watcher: PassWatcher
    settings: PoolSettings
    valid: Tensor | None
    tokens: int
    layers: list[RaggedLayer] = field(default_factory=list)
    cache: Cache | None = None
    attended: Attended | None = None


class _Session:
    """The hooks of one block. Each thread has its own running pass."""

    def __init__(
        self, model: PreTrainedModel, decoder: Any, start: Callable[[], PassWatcher], budget: CacheBudget
    ) -> None:
        self.model, self.start, self.budget = model, start, budget
        self.own_forward = decoder.forward
        self.turns = bool(RotaryState.of(decoder).modules)  # whether rotary frequencies follow the length
        self.signature = inspect.signature(decoder.forward)
        self.of_thread = threading.local()

    @property
    def running(self) -> _Pass | None:
        return getattr(self.of_thread, "running", None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """In place of the decoder's own: one pass, or one a chunk. Returns what the last one does."""
        given = self.signature.bind_partial(*args, **kwargs).arguments
        given = {**given.pop("kwargs", {}), **given}
        check_cache(given.get("past_key_values"))
        use_cache = given.get("use_cache")
        configured = self.model.config.get_text_config().use_cache
        if given.get("past_key_values") is None and not (configured if use_cache is None else use_cache):
            raise ValueError("use_cache must be True inside `with press(model)`: without a cache nothing is compressed")
        calls = [given]
        if self.budget.chunk_size is not None:
            calls = pieces(given, self.budget.chunk_size, lambda: DynamicCache(config=self.model.config))
        if len(calls) > 1:
            self._state(given)  # a mask that a late chunk would refuse is refused now
        output = None
        with _shown(self.budget.progress, sum(_tokens(call) for call in calls), len(calls) > 1) as read:
            for call in calls:
                output = self._pass(call)
                read(_tokens(call))
        return output

    def _pass(self, given: dict[str, Any]) -> Any:
        if _tokens(given) == 0:
            return self.own_forward(**given)
        cache = given.get("past_key_values")
        watcher = self.start()
        bounded, valid = self._state(given)
        settings = watcher.settings(cast(Pool, bounded[0].pool).settings if bounded else None)
        self.of_thread.running = running = _Pass(watcher, settings, valid, _tokens(given))
        try:
            # In a plain cache, sliding layers may hold everything: their masks are made by the sizes of these layers.
            if cache is not None and all(layer in bounded or layer.is_sliding for layer in cache.layers):
                for layer in bounded:
                    layer.watched = True
            output = self.own_forward(**given)
            if running.cache is not None and running.layers:
                with torch.no_grad():
                    watcher.end(self.model, running.cache, running.layers, running.tokens)
            return output
        finally:
            self.of_thread.running = None
            for layer in (*bounded, *running.layers):
                layer.watched = False

    @staticmethod
    def _state(given: dict[str, Any]) -> tuple[list[RaggedLayer], Tensor | None]:
        """The bounded layers that a call finds, and the validity [b, t] of all tokens after it; checks its mask."""
        cache = given.get("past_key_values")
        ragged = [layer for layer in ([] if cache is None else cache.layers) if isinstance(layer, RaggedLayer)]
        bounded = [layer for layer in ragged if layer.pool is not None]
        if bounded:
            check_padding(given.get("attention_mask"), bounded[0].padding, bounded[0].get_seq_length() + _tokens(given))
        return bounded, validity_after(given, cache)

    def attend(
        self, module: nn.Module, inputs: AttentionInputs | None, key: Any, value: Any, mask: Tensor | None
    ) -> None:
        """Note what the attention function got, and let it attend."""
        running = self.running
        if running is None:
            return
        running.attended = Attended(module, mask, inputs)
        if isinstance(key, RaggedKeys):
            cast(RaggedLayer, key.layer).watched = True

    def after_attention(self, module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        """Bring a full-attention layer under the budget, and show it to the watcher."""
        running = self.running
        if running is None:
            return
        attended, running.attended = running.attended, None
        attended, cache = checked(attended, module, kwargs)
        running.cache = cache
        if attended.inputs is None:
            return
        with torch.no_grad():
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            show = partial(LayerPrefill, module, hidden, attentions=output[1])
            self._show(running, cache, int(cast(Any, module).layer_idx), attended.inputs, show, kwargs)

    def _show(
        self,
        running: _Pass,
        cache: Any,
        index: int,
        inputs: AttentionInputs,
        show: Callable[..., LayerPrefill],
        kwargs: dict[str, Any],
    ) -> None:
        """Make a dense layer a compressed one from which nothing is missing yet, and show either."""
        n = running.tokens
        layer = cache.layers[index]
        described = {**kwargs, "attention_inputs": inputs}
        if isinstance(layer, RaggedLayer):
            keys, values = layer.store.newest(n)
        else:
            keys, values = layer.keys[:, :, -n:], layer.values[:, :, -n:]
            valid = cast(Tensor, running.valid).to(keys.device)
            if not valid.all():
                described["valid"] = valid[:, -n:]
            padding = (~valid).sum(-1).tolist()
            kept = valid.unsqueeze(1).expand(layer.keys.shape[:3])
            compress_layer(cache, index, kept, torch.zeros(kept.shape, device=keys.device), padding)
            layer = cast(RaggedLayer, cache.layers[index])
            layer.become_context(max(padding))
        if layer.pool is None:
            layer.start_pool(running.settings, index)
            cast(Any, layer.resampler).remember(inputs.query, layer.appended)
        layer.watched = True
        running.layers.append(layer)
        # kvpress' scorers may ask for positions to come, on an embedding that keeps what it has seen.
        with RotaryState.of(self.model).held() if self.turns else nullcontext():
            running.watcher.layer(layer, show(keys=keys, values=values, kwargs=described))


def _tokens(given: dict[str, Any]) -> int:
    ids, embeds = given.get("input_ids"), given.get("inputs_embeds")
    inputs = embeds if ids is None else ids
    return 0 if inputs is None else inputs.shape[1]


@contextmanager
def _shown(progress: Progress, tokens: int, several: bool) -> Iterator[Callable[[int], None]]:
    """What to call with the number of tokens of each chunk."""
    if not several or progress is False:
        yield lambda read: None
    elif progress is True:
        with tqdm(total=tokens, unit="tok", desc="prefill") as bar:
            yield lambda read: cast(None, bar.update(read))
    else:
        done = [0]

        def report(read: int) -> None:
            done[0] += read
            cast(Callable[[int, int], None], progress)(done[0], tokens)

        yield report
