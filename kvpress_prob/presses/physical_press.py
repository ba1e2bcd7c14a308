"""Presses that hide entries, made to evict them."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from kvpress import BasePress, DecodingPress, DMSPress, DuoAttentionPress, PrefillDecodingPress
from torch import Tensor
from transformers import Cache, Gemma3ForConditionalGeneration, PreTrainedModel

from kvpress_prob.hf import (
    bytes_per_token,
    cache_bytes,
    enclosed_prefills,
    evict_hidden,
    full_attention_layers,
    take_hidden,
)
from kvpress_prob.hf.observing import configured_attention
from kvpress_prob.hf.supported import decoder_of
from kvpress_prob.maths.arguments import check_ratio
from kvpress_prob.presses.later import Later
from kvpress_prob.presses.probabilistic_press import ProbabilisticPress
from kvpress_prob.presses.report import CompressionReport

_RATIOS = ("compression_ratio", "head_compression_ratio")


@dataclass
class PhysicalPress(BasePress):
    """
    A kvpress press that hides entries from attention, with the hidden entries really evicted.

    kvpress' head-wise presses (AdaKV, CriticalAdaKV, KVzip, KVgrad, DuoAttention, DMS, LU-KV) keep the
    whole cache and hide entries while decoding, so they save no memory. Here the wrapped press runs as it is; behind
    its prefill everything that it hides is evicted into a store with a different number of entries for every head, with
    weight 1. Answers are those of the wrapped press, the bytes drop, and nothing is left on the model's modules.

    Every prefill gets a block of the wrapped press of its own, as in kvpress' pipeline. What a press does when its
    block ends (KVzip reconstructs the context) thus happens at the end of the prefill, and generating inside the block
    of this press works too.

    Parameters
    ----------
    press : BasePress
        Any kvpress press that sets ``masked_key_indices`` for a prefill and leaves the prefill's entries in the cache,
        no more and no fewer (KVCompose leaves its reconstruction there).

    Attributes
    ----------
    report : CompressionReport or None
        Figures of the last compressed prefill. ``bytes_before`` is what the wrapped press held.
    """

    press: BasePress
    report: CompressionReport | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        self._check()

    def _check(self) -> None:
        if not isinstance(self.press, BasePress):
            raise TypeError(f"press must be a kvpress press, got {type(self.press).__name__}")
        for press in _nested(self.press):
            name = type(press).__name__
            if isinstance(press, PhysicalPress | ProbabilisticPress):
                raise TypeError(f"press must hide entries, got {name}, which evicts them itself")
            if isinstance(press, DecodingPress | PrefillDecodingPress) or getattr(press, "decoding", False):
                raise ValueError(
                    f"press must hide entries at the prefill only, got {name} that compresses while decoding too: "
                    "entries that are evicted cannot be chosen from again"
                )
        for ratio in self._ratios():
            check_ratio(ratio)

    def _ratios(self) -> list[float]:
        """Those of the press and of the presses that it wraps."""
        settings = [vars(press).get(name) for press in _nested(self.press) for name in _RATIOS]
        return [ratio for ratio in settings if ratio is not None]

    @property
    def compression_ratio(self) -> float:
        """The wrapped press' ratio; DuoAttention's is its ratio of heads."""
        press = cast(Any, self.press)
        return press.head_compression_ratio if isinstance(press, DuoAttentionPress) else press.compression_ratio

    @compression_ratio.setter
    def compression_ratio(self, value: float) -> None:
        name = "head_compression_ratio" if isinstance(self.press, DuoAttentionPress) else "compression_ratio"
        setattr(self.press, name, value)

    def compress(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Not a per-layer method: what is hidden is known behind the last layer."""
        raise NotImplementedError("PhysicalPress compresses whole caches: use it as the outermost press")

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Generator[None, None, None]:
        """Compress every prefill inside the block. Decoding works inside and after it.

        Raises
        ------
        TypeError, ValueError
            For presses, models and caches that are not supported, before anything has run; and behind the prefill if
            the wrapped press has evicted entries itself.
        """
        self._check()
        self.report = None
        modules = [layer.self_attn for layer in decoder_of(model).layers]
        attention = configured_attention(modules[0])
        if modules[0].config._attn_implementation != attention:
            raise ValueError(
                "model, or another with the same configuration, is already inside a `with press(model)` block of a "
                "probabilistic press"
            )
        if attention != "sdpa":
            raise ValueError(f"model must have attn_implementation='sdpa' for a press that hides, got {attention!r}")
        layers = _compressed_layers(model, type(self.press).__name__)
        block, end = partial(_block, self.press, model, modules), partial(self._end, layers, modules)
        hides = any(self._ratios()) or any(isinstance(it, DMSPress) for it in _nested(self.press))  # by a threshold
        with enclosed_prefills(model, block, end, Later(hides)):
            yield

    def _end(self, layers: list[int], modules: list[Any], cache: Cache, valid: Tensor) -> None:
        """Evict what the wrapped press hides, and write the report."""
        press, tokens = self.press, valid.shape[1]
        hidden = take_hidden(modules)
        for layer in layers:
            left = cast(Tensor, cache.layers[layer].keys).shape[2]
            if left != tokens:
                raise ValueError(
                    f"press must leave all {tokens} entries of the prefill in the cache, got {type(press).__name__}, "
                    f"which left {left} in layer {layer}: use it without PhysicalPress"
                )
        before, lengths = cache_bytes(cache), valid.sum(-1)
        if hidden:
            kept = evict_hidden(cache, layers, hidden, valid)
        else:
            heads = cast(Tensor, cache.layers[layers[0]].keys).shape[1]
            kept = lengths.cpu().view(1, -1, 1).repeat(len(layers), 1, heads)
        report = CompressionReport(
            target_ratio=0.0,
            context_lengths=lengths.tolist(),
            layers=layers,
            kept=kept,
            effective=kept.double(),
            draws=None,
            bytes_before=before,
            bytes_after=cache_bytes(cache),
            bytes_per_token=bytes_per_token(cache),
            seed=None,
            settings=" of ".join(type(it).__name__ for it in _nested(press)) + ", hidden entries evicted",
        )
        # How much DuoAttention and DMS hide follows from the context.
        follows = isinstance(press, DuoAttentionPress | DMSPress)
        self.report = replace(report, target_ratio=report.achieved_ratio if follows else self.compression_ratio)


def _nested(press: Any) -> Iterator[Any]:
    """A press and the presses that it wraps."""
    yield press
    for part in (getattr(press, "press", None), *getattr(press, "presses", ())):
        if part is not None:
            yield from _nested(part)


@contextmanager
def _block(press: BasePress, model: PreTrainedModel, modules: list[Any]) -> Iterator[None]:
    """The wrapped press' block; an error inside it leaves nothing hidden."""
    take_hidden(modules)
    try:
        with press(model):
            yield
    except BaseException:
        take_hidden(modules)
        raise


def _compressed_layers(model: PreTrainedModel, press: str) -> list[int]:
    """Layers that kvpress compresses; of all models but one that would be sliding-window layers too."""
    full, layers = full_attention_layers(model), len(decoder_of(model).layers)
    if len(full) < layers and not isinstance(model, Gemma3ForConditionalGeneration):
        raise ValueError(
            f"model must not have sliding-window layers for {press}, which compresses all {layers} layers of "
            f"{type(model).__name__}, {layers - len(full)} of them sliding: use a press of this package"
        )
    return full
