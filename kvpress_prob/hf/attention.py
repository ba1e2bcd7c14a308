"""Decode-time attention over a compressed cache layer, for any model that attends with ``sdpa`` or ``eager``.

A model's attention module hands its attention function the query and whatever ``cache.update`` returned, but not the
cache. So a compressed layer returns ``RaggedKeys`` and ``RaggedValues``: not tensors, but objects that implement
torch's ``__torch_function__`` protocol. When transformers' sdpa function passes them to
``scaled_dot_product_attention``, or a model's eager function multiplies, masks and normalises, the call arrives here
and the layer attends. Nothing is registered or replaced, nothing is stored on the model, a plain cache never comes near
this code, and a function that cannot read a compressed layer raises instead of computing something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvpress_prob.ragged import RaggedKV

SUPPORTED_ATTENTION = ("sdpa", "eager")


class CompressedLayer(Protocol):
    """What travels with the keys and values of a compressed layer: enough to describe and to attend to them."""

    store: RaggedKV

    def attend(self, query: Tensor, mask: Tensor | None, scaling: float, softcap: float | None) -> Tensor:
        """Attention output [b hq n dv] of the newest ``n`` tokens, whose queries these are, over the layer."""
        ...


class _Dispatch:
    """Sends torch functions called on an instance to ``_HANDLERS``."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        handler = _HANDLERS.get(func)
        if handler is None:
            raise TypeError(
                f"{getattr(func, '__name__', func)} cannot read a compressed KV cache: decode with attn_implementation "
                f"in {SUPPORTED_ATTENTION}"
            )
        return handler(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        # AttributeError, so that hasattr and copy work.
        raise AttributeError(
            f"{type(self).__name__} of a compressed KV cache has no {name!r}: it can only be attended to, "
            f"with attn_implementation in {SUPPORTED_ATTENTION}, and attention weights are not kept"
        )


@dataclass(frozen=True)
class _Entries(_Dispatch):
    """The keys or values of a compressed layer, as many as its logical length says (not as are stored)."""

    layer: CompressedLayer
    length: int

    @property
    def _buffer(self) -> Tensor:
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        store = self.layer.store
        return torch.Size((store.batch, store.kv_heads, self.length, self._buffer.shape[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return self._buffer.dtype

    @property
    def device(self) -> torch.device:
        return self._buffer.device

    def __getitem__(self, index: tuple) -> _Entries:
        """``[:, :, :n]`` is the first ``n`` entries (how kvpress drops an answer), ``[:, :, None, :, :]`` what
        ``repeat_kv`` asks for."""
        everything = slice(None)
        match index:
            case (a, b, None, c, d) if (a, b, c, d) == (everything,) * 4:
                return self
            case (a, b, slice(start=None, stop=stop, step=None)) if (a, b) == (everything,) * 2:
                return replace(self, length=len(range(self.length)[:stop]))
        raise TypeError(f"a compressed KV cache can be indexed with [:, :, :n] only, got {index}")

    def __setitem__(self, index: tuple, value: Tensor) -> None:
        """Ignored: kvpress' wrapper overwrites keys that *another* cache on the same module masks
        (``masked_key_indices``)."""

    # transformers' repeat_kv copies every key once per query head of its group. Queries are grouped instead.
    def expand(self, *sizes: int) -> _Entries:
        return self

    def reshape(self, *sizes: int) -> _Entries:
        return self


class RaggedKeys(_Entries):
    """What ``RaggedLayer.keys`` and ``update`` return."""

    @property
    def _buffer(self) -> Tensor:
        return self.layer.store.keys

    def transpose(self, first: int, second: int) -> RaggedKeysTransposed:
        if {first % 4, second % 4} != {2, 3}:
            raise TypeError(
                f"decode with attn_implementation in {SUPPORTED_ATTENTION}: a compressed KV cache has no other layout"
            )
        return RaggedKeysTransposed(self.layer)


class RaggedValues(_Entries):
    """What ``RaggedLayer.values`` and ``update`` return."""

    @property
    def _buffer(self) -> Tensor:
        return self.layer.store.values


@dataclass(frozen=True)
class RaggedKeysTransposed(_Dispatch):
    """``keys.transpose(2, 3)``, waiting for the query."""

    layer: CompressedLayer


@dataclass(frozen=True)
class RaggedLogits(_Dispatch):
    """``query @ keys.transpose(2, 3)`` of eager attention and what was done to it since; computed with the values.

    Attributes
    ----------
    scaling, softcap
        The logits are ``scaling q.k``, or ``softcap tanh(scaling q.k / softcap)``.
    stage
        "linear", "tanh" (a tanh was applied, its factor is still to come), "capped", "masked" or "normalised".
    """

    layer: CompressedLayer
    query: Tensor
    scaling: float = 1.0
    softcap: float | None = None
    mask: Tensor | None = None
    stage: str = "linear"

    @property
    def dtype(self) -> torch.dtype:
        return self.query.dtype

    def __mul__(self, factor: float) -> RaggedLogits:
        if self.stage == "linear":
            return replace(self, scaling=self.scaling * factor)
        self._expect("tanh", "multiplied")
        return replace(self, softcap=float(factor), scaling=self.scaling * factor, stage="capped")

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> RaggedLogits:
        self._expect("linear", "divided")
        return replace(self, scaling=self.scaling / divisor)

    def __add__(self, mask: Tensor) -> RaggedLogits:
        self._expect(("linear", "capped"), "masked")
        return replace(self, mask=mask, stage="masked")

    def to(self, *args: Any, **kwargs: Any) -> RaggedLogits:
        """The result gets the query's dtype whatever the intermediate ones."""
        return self

    def tanh(self) -> RaggedLogits:
        self._expect("linear", "passed through tanh")
        return replace(self, stage="tanh")

    def normalised(self) -> RaggedLogits:
        self._expect(("linear", "capped", "masked"), "normalised")
        return replace(self, stage="normalised")

    def attend(self) -> Tensor:
        self._expect("normalised", "multiplied with the values")
        return self.layer.attend(self.query, self.mask, self.scaling, self.softcap)

    def _expect(self, stages: str | tuple[str, ...], action: str) -> None:
        if self.stage not in stages:
            raise TypeError(
                f"this model's eager attention cannot read a compressed KV cache ({self.stage} logits are {action}): "
                "use attn_implementation='sdpa'"
            )


def _scaled_dot_product_attention(
    query: Tensor,
    key: RaggedKeys,
    value: RaggedValues,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    _refuse_dropout(dropout_p)
    return key.layer.attend(query, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale, None)


def _matmul(left: Tensor | RaggedLogits, right: RaggedKeysTransposed | RaggedValues) -> RaggedLogits | Tensor:
    if isinstance(left, Tensor) and isinstance(right, RaggedKeysTransposed):
        return RaggedLogits(right.layer, left)
    if isinstance(left, RaggedLogits) and isinstance(right, RaggedValues):
        return left.attend()
    raise TypeError(f"a compressed KV cache cannot multiply {type(left).__name__} and {type(right).__name__}")


def _masked(mask: Tensor, logits: RaggedLogits) -> RaggedLogits:
    """What ``logits + mask`` becomes under torch.compile, which swaps the two."""
    return logits.__add__(mask)


def _softmax(
    logits: RaggedLogits, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> RaggedLogits:
    return logits.normalised()


def _dropout(logits: RaggedLogits, p: float = 0.5, training: bool = True, inplace: bool = False) -> RaggedLogits:
    _refuse_dropout(p if training else 0.0)
    return logits


def _refuse_dropout(p: float) -> None:
    if p:
        raise NotImplementedError(
            f"attention dropout over a compressed KV cache: expected 0, got {p}; call model.eval()"
        )


_HANDLERS = {
    F.scaled_dot_product_attention: _scaled_dot_product_attention,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
    torch.tanh: RaggedLogits.tanh,
    F.softmax: _softmax,
    F.dropout: _dropout,
    Tensor.add: _masked,
}
