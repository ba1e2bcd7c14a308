"""A transformers cache layer over the ragged store.

A ``RaggedLayer`` stands where a ``DynamicLayer`` was and stores a different number of entries per head. All state of a
compressed context lives here: two caches on one model never see each other, and deep copies are independent.

Two lengths are never mixed. The *logical* length, context plus appended tokens, is what positions and masks count;
``get_seq_length`` returns it. The *physical* lengths are what is stored, one per batch row and head.
"""

from typing import Any, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from kvpress_prob.hf.attention import RaggedKeys, RaggedValues
from kvpress_prob.hf.masks import apply_mask, show, shown
from kvpress_prob.hf.pool import Pool, PoolSettings
from kvpress_prob.hf.resampling import Resampler, ResamplingSettings
from kvpress_prob.hf.shared_reads import SharedReads
from kvpress_prob.ops.append import append
from kvpress_prob.ops.precision import without_autocast
from kvpress_prob.ops.weighted_decode import weighted_decode
from kvpress_prob.ragged import RaggedKV

_HIDES_APPENDED = "with a CacheBudget, attention_mask may hide padding before the context only"


class _NoGradient(torch.autograd.Function):
    """The output, whose gradient nobody computes."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, query: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError(
            "no gradients flow through a compressed KV cache: call the model without asking for them, or with a dense "
            "cache"
        )


class RaggedLayer(CacheLayerMixin):
    """Cache layer of a compressed context plus everything appended after it.

    Parameters
    ----------
    store : RaggedKV
        The kept entries of the context.
    context_length : int
        Tokens of the context before eviction, left padding included.
    padding : list of int
        Left padding of each batch row.
    resampling : ResamplingSettings, optional
        Budget for decoding. Each time it is exceeded, all but the newest appended tokens become part of the context.
    reads : SharedReads, optional
        What the layers of a cache ask of the device together (``shared_reads``).
    """

    is_compileable = False
    is_sliding = False
    is_initialized = True

    # The base class' __init__ only sets `keys`, `values` and `is_initialized`, which are properties and a constant
    # here.
    def __init__(
        self,
        store: RaggedKV,
        context_length: int,
        padding: list[int],
        resampling: ResamplingSettings | None = None,
        reads: SharedReads | None = None,
    ):
        self.store = store
        self.context_length = context_length
        self.padding = padding
        self.appended = 0
        self.hides = False
        self.resampler = None if resampling is None else Resampler(resampling, store)
        self.pool: Pool | None = None
        self.watched = False  # inside a block that bounds this pass itself
        self.spent = False
        self.reads = SharedReads() if reads is None else reads

    def __repr__(self) -> str:
        stored = int(self.store.length.sum())
        return f"RaggedLayer(context={self.context_length}, appended={self.appended}, stored={stored})"

    # The base class declares dense tensors; every reader of a compressed layer goes through hf.attention.
    @property
    def keys(self) -> RaggedKeys:
        return RaggedKeys(self, self.get_seq_length())

    @keys.setter
    def keys(self, first: RaggedKeys) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._assign(first)

    @property
    def values(self) -> RaggedValues:
        return RaggedValues(self, self.get_seq_length())

    @values.setter
    def values(self, first: RaggedValues) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        self._assign(first)

    def _assign(self, first: RaggedKeys | RaggedValues) -> None:
        """``layer.keys = layer.keys[:, :, :n]`` crops to ``n`` tokens; nothing else can be assigned.

        kvpress' pipeline drops every answer this way, the last one too. After a resampling the context cannot be had
        back, so the layer is spent: the next forward pass over it raises.
        """
        if not isinstance(first, RaggedKeys | RaggedValues) or first.layer is not self:
            raise TypeError(
                f"a compressed cache layer can be set to layer.keys[:, :, :n] only, got {type(first).__name__}"
            )
        sampled = (self.resampler is not None and any(self.resampler.rounds)) or self.pool is not None
        if sampled and first.length < self.context_length:
            self.spent = True
        else:
            self.crop(first.length)

    def update(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict[str, Any] | None = None
    ) -> tuple[RaggedKeys, RaggedValues]:
        """Append new tokens in place; returns what ``hf.attention`` reads."""
        if self.spent:
            raise NotImplementedError(
                "this cache was sampled again while decoding, so its context cannot answer another question: "
                "compress the context again, or use a larger CacheBudget"
            )
        n = key_states.shape[2]
        # Under a budget no more room than until the next sampling.
        growth = None if self.resampler is None else self.resampler.settings.budget.interval
        self.store = self.store.with_room(n, growth)
        dtype = self.store.keys.dtype  # autocast may have it otherwise
        append(self.store, key_states.to(dtype), value_states.to(dtype))
        if self.pool is not None:
            first = torch.tensor([self.get_seq_length()], device="cpu") - torch.tensor(self.padding, device="cpu")
            self.pool.admit(self.store, first.unsqueeze(-1) + torch.arange(n, device="cpu"))
        self.appended += n
        return self.keys, self.values

    def apply_mask(self, mask: Tensor | None, n: int) -> None:
        """Take over a mask [b or 1, heads or 1, n, logical length] for the newest ``n`` tokens; bool, or additive with
        0 and -inf. None hides nothing.

        Appended tokens that the mask hides (padding of a batch of questions) get weight 0 until a later mask shows
        them. The compressed context is there for every row or for none: a mask over it that is not its own left
        padding, and anything that is not causal, is refused.
        """
        store = self.store
        if mask is not None:
            begin = self.get_seq_length() - mask.shape[-1] if self.watched else 0
            padding = [max(pad - begin, 0) for pad in self.padding]
            covers = (n, padding, max(self.context_length - begin, 0), min(self.appended, mask.shape[-1]))
            if torch.compiler.is_compiling():
                newest = mask[..., -1, self.context_length :]
                if self.resampler is not None and not (newest if mask.dtype == torch.bool else newest == 0).all():
                    raise NotImplementedError(_HIDES_APPENDED)
                apply_mask(store.log_w, store.start, store.length, mask, *covers)
                self.hides = True
                return
            key = (n, *padding, *covers[2:])
            visible = self.reads.once("mask", self, mask, key, lambda: shown(mask, *covers))
            if visible is not None and self.resampler is not None:
                raise NotImplementedError(_HIDES_APPENDED)
            if visible is not None or self.hides:
                show(store.log_w, store.start, store.length, self.appended, visible)
            self.hides = visible is not None
        elif any(self.padding) and not self.watched:
            raise NotImplementedError(
                "attention_mask must be given over a compressed KV cache with left padding, got None"
            )
        elif self.hides:
            show(store.log_w, store.start, store.length, self.appended, None)
            self.hides = False

    @without_autocast
    def attend(self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
        """Attention output [b hq n dv] of the newest ``n`` tokens; afterwards the layer is kept to its budget."""
        self.apply_mask(mask, query.shape[2])
        asked = query.to(self.store.keys.dtype)
        output = weighted_decode(asked, self.store, scaling=scaling, softcap=softcap)[0].to(query.dtype)
        if self.resampler is not None:
            self._keep_to_budget(self.resampler, asked, scaling, softcap)
        if query.requires_grad and torch.is_grad_enabled():
            output = cast(Tensor, _NoGradient.apply(output, query))
        return output

    def _keep_to_budget(self, resampler: Resampler, query: Tensor, scaling: float, softcap: float | None) -> None:
        resampler.remember(query, self.appended)
        rows = [] if self.watched else resampler.exceeded(self.appended, self.store.kv_heads)
        if rows:
            self.store = resampler.sample(self.store, rows, scaling, softcap)
            whole = cast(Tensor, resampler.queries).shape[2]
            self.context_length += self.appended - whole
            self.appended = whole

    def start_pool(self, settings: PoolSettings, layer: int) -> None:
        """Let everything that is held, and everything to come, be evicted in turn."""
        self.pool = Pool(settings, layer, self.store.batch, self.store.kv_heads, self.store.log_w.device)
        self.store = self.pool.adopt(self.store)
        self.resampler = Resampler(settings.resampling(layer), self.store)
        self.resampler.count(self.store, self.appended)

    def become_context(self, length: int) -> None:
        """Of the first ``length`` tokens, some have been evicted; those after are there as a whole."""
        self.appended = self.get_seq_length() - length
        self.context_length = length
        if self.resampler is not None:
            self.resampler.keep(self.appended)
            self.resampler.count(self.store, self.appended)

    def get_seq_length(self) -> int:
        return self.context_length + self.appended

    def get_mask_sizes(self, cache_position: Tensor) -> tuple[int, int]:
        """Tokens that a mask covers, and the first of them. A bounded prefill's masks begin where nothing was evicted
        yet: what is hidden before that is known, and masks over everything that was read would grow with it."""
        begin = self.context_length if self.watched else 0
        return self.get_seq_length() + cache_position.shape[0] - begin, begin

    def get_max_cache_shape(self) -> int:
        return -1

    def crop(self, max_length: int) -> None:
        """Drop tokens after ``max_length`` (or the last ``-max_length`` ones). Evicted context cannot be cropped."""
        length = self.get_seq_length()
        max_length = length + max_length if max_length < 0 else max_length
        if max_length < self.context_length:
            raise NotImplementedError(
                f"cannot crop into a compressed context of {self.context_length} tokens, got {max_length}"
            )
        drop = max(length - max_length, 0)
        self.store.truncate(drop)
        self.appended -= drop
        if self.resampler is not None:
            self.resampler.forget(drop)

    def batch_select_indices(self, indices: Tensor) -> None:
        rows = self.reads.once(
            "rows", self, indices, (), lambda: torch.arange(self.store.batch, device="cpu")[indices.cpu()].tolist()
        )
        self.store = self.store.select_rows(rows)
        self.padding = [self.padding[row] for row in rows]
        if self.resampler is not None:
            self.resampler.select_rows(rows)
        if self.pool is not None:
            self.pool.select_rows(rows)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(self.store.batch, device="cpu").repeat_interleave(repeats))

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise NotImplementedError("a compressed cache layer holds its context already")

    def reset(self) -> None:
        raise NotImplementedError("a compressed cache cannot be reset: make a new DynamicCache")

    def offload(self) -> None:
        raise NotImplementedError("a compressed cache cannot be offloaded")

    def prefetch(self) -> None:
        raise NotImplementedError("a compressed cache cannot be offloaded")


def reads_of(cache: Cache) -> SharedReads:
    """What the compressed layers of a cache share, for a layer that joins them."""
    layers = (layer for layer in cache.layers if isinstance(layer, RaggedLayer))
    return next((layer.reads for layer in layers), None) or SharedReads()
