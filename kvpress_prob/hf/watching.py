"""Watching a model's prefills: what every layer's attention got, and when the last layer is done.

Inside ``with watch_prefills(model, start)``, each forward pass that begins on an empty cache is a prefill. Its layers
are shown to the object that ``start()`` returned, one call after each full-attention layer, then one call at the end,
when the cache is dense and complete. On exit the model is as it was.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from kvpress_prob.hf.claiming import claimed
from kvpress_prob.hf.compiled import uncompiled
from kvpress_prob.hf.observing import Attended, AttentionInputs, checked, observed
from kvpress_prob.hf.prefill import LayerPrefill, Prefill, PrefillChecker, PrefillWatcher, Upcoming
from kvpress_prob.hf.rotary import RotaryState, reachable_rotary
from kvpress_prob.hf.supported import check_cache, decoder_of, wrappers_of
from kvpress_prob.hf.validity import position_after, text_ids, token_validity
from kvpress_prob.ops.precision import one_dtype

Later = Callable[[int, int], None]

_LOCK = threading.Lock()


@contextmanager
def watch_prefills(
    model: PreTrainedModel, start: Callable[[], PrefillWatcher], later: Later | None = None
) -> Iterator[None]:
    """Show every prefill inside the block, of whatever thread, to a new ``start()``.

    Parameters
    ----------
    model : PreTrainedModel
    start : callable
        Makes the watcher of one prefill.
    later : callable, optional
        Called before every forward pass on a cache that holds something already, with the number of tokens of the pass
        and of the cache.

    Raises
    ------
    TypeError
        For a model that cannot be compressed, at once; for a cache that cannot be, before the model runs.
    ValueError
        If the model attends with something else than sdpa or eager, or is being watched already.
    """
    decoder = decoder_of(model)
    modules = [layer.self_attn for layer in decoder.layers]
    session = _Session(model, decoder, start, later)
    with claimed(decoder):
        try:
            session.enter(modules)
            yield
        finally:
            session.close()


@dataclass
class _Running:
    """A prefill between its first and its last layer."""

    watcher: PrefillWatcher
    valid: Tensor
    next_position: Tensor
    input_ids: Tensor | None
    padded: bool
    cache: Cache | None = None
    layers: list[int] = field(default_factory=list)
    attended: Attended | None = None


class _Session:
    """The hooks of one ``watch_prefills`` block. Each thread has its own running prefill, most threads none.

    A prefill that another thread has begun before the block ends is still compressed: hooks and names go when the last
    one is done.
    """

    def __init__(
        self, model: PreTrainedModel, decoder: nn.Module, start: Callable[[], PrefillWatcher], later: Later | None
    ) -> None:
        self.model = model
        self.decoder = decoder
        self.start = start
        self.later = later
        self.signature = inspect.signature(type(getattr(decoder, "_orig_mod", decoder)).forward)
        self.rotary = RotaryState.of(decoder)
        self.ending: set[threading.Thread] = set()
        self.called: dict[threading.Thread, Tensor] = {}
        self.running: dict[threading.Thread, _Running] = {}
        self.open = True
        self.on_model = ExitStack()

    def enter(self, modules: list[Any]) -> None:
        """Put hooks and names on the model."""
        decoder, on_model = self.decoder, self.on_model
        # Compiled code does not look for hooks: for the length of the block all of it runs as it was written.
        on_model.enter_context(uncompiled())
        on_model.enter_context(self.rotary.kept())
        on_model.enter_context(reachable_rotary(decoder))
        for module in modules:
            on_model.callback(module.register_forward_hook(self.after_attention, with_kwargs=True).remove)
        on_model.callback(decoder.register_forward_pre_hook(self.before_model, with_kwargs=True).remove)
        for wrapper in wrappers_of(self.model, decoder):
            on_model.callback(wrapper.register_forward_pre_hook(self.before_wrapper, with_kwargs=True).remove)
        after = decoder.register_forward_hook(self.after_model, with_kwargs=True, always_call=True)
        on_model.callback(after.remove)
        on_model.enter_context(observed(modules, self))

    def close(self) -> None:
        """Let no further prefill begin. One of this thread is over, as is one of a thread that has ended."""
        with _LOCK:
            self.open = False
            here = threading.current_thread()
            self.running = {it: run for it, run in self.running.items() if it is not here and it.is_alive()}
        self._leave()

    def _leave(self) -> None:
        """Take everything off the model once the block has ended and no prefill is running."""
        with _LOCK:
            if self.open or self.running:
                return
            on_model = self.on_model.pop_all()
        on_model.close()

    def before_wrapper(self, wrapper: nn.Module, args: tuple, kwargs: dict) -> None:
        """Note the tokens that a wrapper is called with: its decoder gets embeddings of them."""
        ids = text_ids(wrapper, args, kwargs)
        if ids is not None:
            self.called[threading.current_thread()] = ids
        elif wrapper is self.model:
            self.called.pop(threading.current_thread(), None)

    def before_model(self, decoder: nn.Module, args: tuple, kwargs: dict) -> None:
        """Decide whether this pass is a prefill; refuse what cannot be compressed before anything has run."""
        here = threading.current_thread()
        if here in self.ending:  # a pass of the watcher's own
            return
        self.running.pop(here, None)
        called = self.called.pop(here, None)
        if not self.open:
            return self._leave()
        given = self.signature.bind_partial(decoder, *args, **kwargs).arguments
        given = {**given.pop("kwargs", {}), **given}
        cache, ids, embeds = (given.get(name) for name in ("past_key_values", "input_ids", "inputs_embeds"))
        check_cache(cache)
        use_cache = given.get("use_cache")
        if cache is None and not (self.model.config.get_text_config().use_cache if use_cache is None else use_cache):
            raise ValueError("use_cache must be True inside `with press(model)`: without a cache nothing is compressed")
        inputs = embeds if ids is None else ids
        if inputs is None:
            return
        if cache is not None and cache.get_seq_length() > 0:
            if self.later is not None:
                self.later(inputs.shape[1], cache.get_seq_length())
            return
        if ids is None and called is not None and called.shape == inputs.shape[:2]:
            ids = called
        valid = token_validity(given.get("attention_mask"), inputs)
        next_position = position_after(given.get("position_ids"), inputs)
        running = _Running(self.start(), valid, next_position, ids, padded=not valid.all())
        if isinstance(running.watcher, PrefillChecker):
            running.watcher.begin(Upcoming(self.model, self.decoder, valid, next_position, ids))
        with _LOCK:
            if self.open:
                self.running[here] = running

    def attend(
        self, module: nn.Module, inputs: AttentionInputs | None, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> None:
        """Note what the attention function got, and let it attend."""
        running = self.running.get(threading.current_thread())
        if running is not None:
            running.attended = Attended(module, mask, inputs)

    def after_attention(self, module: nn.Module, args: tuple, kwargs: dict, output: tuple) -> None:
        """Show a full-attention layer of a prefill to the watcher."""
        here = threading.current_thread()
        running = self.running.get(here)
        if running is None or here in self.ending:
            return
        attended, running.attended = running.attended, None
        attended, running.cache = checked(attended, module, kwargs)
        if attended.inputs is None:
            return
        index = cast(int, module.layer_idx)
        running.layers.append(index)
        self._check_dense(running)
        held = running.cache.layers[index]
        # Under autocast they may differ.
        query, keys, values = one_dtype(attended.inputs.query, cast(Tensor, held.keys), cast(Tensor, held.values))
        layer = LayerPrefill(
            module,
            kwargs["hidden_states"] if "hidden_states" in kwargs else args[0],
            keys,
            values,
            output[1],
            {
                **kwargs,
                "attention_inputs": replace(attended.inputs, query=query),
                **({"valid": running.valid.to(keys.device)} if running.padded else {}),
            },
        )
        # kvpress' scorers may ask for positions to come, on an embedding that keeps what it has seen.
        with torch.no_grad(), self.rotary.now().held():
            running.watcher.layer(layer)

    def after_model(self, decoder: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        """Hand the finished prefill to the watcher; ``output`` is None when the forward pass has failed."""
        here = threading.current_thread()
        if here in self.ending:
            return
        running = self.running.get(here)
        try:
            if running is not None and running.cache is not None and output is not None:
                self._end(running, running.cache, output)
        finally:
            self.running.pop(here, None)
            if output is not None:  # torch does not let a failed module's hooks be removed from one of them
                self._leave()

    def _end(self, running: _Running, cache: Cache, output: Any) -> None:
        self._check_dense(running)
        rotary = self.rotary.now()
        prefill = Prefill(
            self.model,
            cache,
            running.layers,
            running.valid,
            running.next_position,
            running.input_ids,
            output[0][:, -1],
            rotary,
        )
        here = threading.current_thread()
        self.ending.add(here)
        try:
            with torch.no_grad(), rotary.kept():
                running.watcher.end(prefill)
        finally:
            self.ending.discard(here)

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
