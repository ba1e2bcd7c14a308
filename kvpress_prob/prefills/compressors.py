"""How each kind of press compresses copies of a shared prefill.

kvpress' presses are never re-implemented: their own forward hooks run on the recorded layers. Only their scores are
remembered where they do not depend on ratio and seed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from kvpress import (
    AdaKVPress,
    BasePress,
    CompactorPress,
    CriticalAdaKVPress,
    DMSPress,
    DuoAttentionPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KnormPress,
    KVzipPress,
    LeverageScorePress,
    RandomPress,
    ScorerPress,
    SnapKVPress,
    TOVAPress,
)
from torch import Tensor, nn
from transformers import DynamicCache, Gemma3ForConditionalGeneration

from kvpress_prob.hf import cache_bytes, decoder_of, evict_hidden
from kvpress_prob.prefills.kvzip import KVzipCompressor
from kvpress_prob.prefills.shared_prefill import Compressed, Costs, SharedPrefill, measured, take_masked
from kvpress_prob.presses import (
    AttentionPress,
    H2OPress,
    MinVariancePress,
    PhysicalPress,
    ProbabilisticPress,
    SurrogatePress,
)
from kvpress_prob.presses.gathering import Gathered

RATIO_FREE = (
    AttentionPress, ExpectedAttentionPress, H2OPress, KeyDiffPress, KnormPress, MinVariancePress, SnapKVPress,
    SurrogatePress, TOVAPress,
)  # fmt: skip
"""Scorers whose scores depend on neither ratio nor seed. Others are scored anew for every row, which is always right:
StreamingLLM's scores know the ratio, Compactor's the ratio and the random state."""
DRAWING = (CompactorPress, LeverageScorePress, RandomPress)
"""kvpress' scorers that use the random state."""


class Compressor(Protocol):
    """One press on one shared prefill."""

    def compress(self, ratio: float, seed: int | None) -> Compressed: ...


def compressor(press: BasePress | None, shared: SharedPrefill) -> Compressor:
    """How to compress copies of ``shared`` with a press; None is no press.

    The press object is used up: nobody else may use it afterwards.

    Raises
    ------
    ValueError
        If kvpress would let the press compress sliding-window layers too, which a shared prefill does not, if it has
        no compression ratio, or a budget of its own.
    """
    if press is None:
        return _Dense(shared)
    if isinstance(press, ProbabilisticPress):
        if press.entries_per_head is not None:
            raise ValueError(
                f"press must get its budget when it compresses, got entries_per_head={press.entries_per_head}"
            )
        return _Probabilistic(press, shared)
    if isinstance(press, PhysicalPress):
        return _Physical(press, shared)
    _check_layers(press, shared)
    if isinstance(press, DMSPress):
        raise ValueError(f"press must have a compression ratio, got {type(press).__name__}, which has a threshold")
    if isinstance(press, KVzipPress):
        return KVzipCompressor(press, shared)
    return _Hooks(press, shared)


def draws(press: BasePress | None) -> bool:
    """Whether the outcome depends on the seed."""
    if isinstance(press, ProbabilisticPress):
        scorers = [component.press for component in press.components]
        return press.sampler != "top_k" or any(isinstance(_scorer_of(scorer), DRAWING) for scorer in scorers)
    return isinstance(_scorer_of(press), DRAWING)


def _check_layers(press: BasePress, shared: SharedPrefill) -> None:
    model = shared.prefill.model
    layers = len(decoder_of(model).layers)
    if len(shared.layers) < layers and not isinstance(model, Gemma3ForConditionalGeneration):
        raise ValueError(
            f"press must be one of this package's for a model with sliding-window layers, got {type(press).__name__}, "
            f"which compresses all {layers} layers of {type(model).__name__}"
        )


class _Dense:
    """The dense cache itself."""

    def __init__(self, shared: SharedPrefill):
        self.shared = shared

    def compress(self, ratio: float, seed: int | None) -> Compressed:
        return measured(self.shared, self.shared.copy_cache(), {}, Costs())


class _Probabilistic:
    """This package's press: gather once, draw and pack for every ratio and seed."""

    def __init__(self, press: ProbabilisticPress, shared: SharedPrefill):
        press.post_init_from_model(shared.prefill.model)
        self.press, self.shared = press, shared

    def compress(self, ratio: float, seed: int | None) -> Compressed:
        costs = Costs()
        gathered = self._gathered(ratio, costs) if ratio else None
        prefill = replace(self.shared.prefill, cache=self.shared.copy_cache())
        with costs.clock("compress_ms", self.shared.device):
            report = self.press.draw(gathered, prefill, ratio, seed)
        done = measured(self.shared, cast(DynamicCache, prefill.cache), {}, costs)
        return replace(done, layer_ratios=report.layer_ratios, effective_fraction=report.effective_fraction)

    def _gathered(self, ratio: float, costs: Costs) -> Gathered:
        """This press' proposals; shared with presses that differ only in how they draw from them."""
        # Some scorers score differently at different ratios.
        free = all(type(component.press) in RATIO_FREE for component in self.press.components)
        gathering = self.press.gathering(0.0 if free else ratio)
        for known, gathered, costs.score_ms in self.shared.gathered:
            if known == gathering.key:
                return gathered
        with costs.clock("spent_ms", self.shared.device), self.shared.rotary():
            for layer in self.shared.layers:
                gathering.layer(layer)
            gathered = gathering.complete(self.shared.prefill)
        costs.score_ms = costs.spent_ms
        self.shared.gathered.append((gathering.key, gathered, costs.spent_ms))
        return gathered


class _Hooks:
    """A kvpress press that works in its forward hook, layer by layer."""

    def __init__(self, press: BasePress, shared: SharedPrefill):
        press.post_init_from_model(shared.prefill.model)
        self.press, self.shared = press, shared
        self.remember = _is_ratio_free(press, RATIO_FREE)
        self.costs = Costs()
        self.known_ms = 0.0
        scorer = _scorer_of(press)
        if scorer is not None:
            self._instrument(scorer)

    def _instrument(self, scorer: ScorerPress) -> None:
        """Time the press' own ``score``, and remember its results where that is right."""
        score, known = scorer.score, {}

        def timed(module: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            if module not in known:
                with self.costs.clock("spent_ms", self.shared.device):
                    scores = score(module, *args, **kwargs)
                if not self.remember:
                    return scores
                known[module] = scores
            return known[module].clone()  # AdaKV writes into the scores

        cast(Any, scorer).score = timed

    def compress(self, ratio: float, seed: int | None) -> Compressed:
        if isinstance(self.press, DuoAttentionPress):
            # Its ratio is one of heads, and read when it meets the model.
            self.press.head_compression_ratio = ratio
            self.press.post_init_from_model(self.shared.prefill.model)
        else:
            cast(Any, self.press).compression_ratio = ratio
        cache = self.shared.copy_cache()
        self.costs = costs = Costs()
        with (
            costs.clock("compress_ms", self.shared.device),
            self.shared.rotary(),
            _random_state(seed),
        ):
            for layer in self.shared.layers:
                kwargs = {**layer.kwargs, "hidden_states": layer.hidden_states, "past_key_values": cache}
                self.press.forward_hook(layer.module, [], kwargs, [None, layer.attentions])
        costs.compress_ms -= costs.spent_ms
        self.known_ms = self.known_ms if self.remember and self.known_ms else costs.spent_ms
        costs.score_ms = self.known_ms if ratio else 0.0
        return measured(self.shared, cache, take_masked(self.shared.layers), costs)


class _Physical:
    """A kvpress press that hides entries, whose hidden entries are evicted."""

    def __init__(self, press: PhysicalPress, shared: SharedPrefill):
        self.hiding, self.shared = compressor(press.press, shared), shared

    def compress(self, ratio: float, seed: int | None) -> Compressed:
        done = self.hiding.compress(ratio, seed)
        if not done.masked:
            return done
        prefill = self.shared.prefill
        hidden = {cast(int, module.layer_idx): indices for module, indices in done.masked.items()}
        with done.costs.clock("compress_ms", self.shared.device):
            evict_hidden(done.cache, prefill.layers, hidden, prefill.valid)
        return replace(done, masked={}, nbytes=cache_bytes(done.cache))


def _scorer_of(press: Any) -> ScorerPress | None:
    """The scorer that a press asks: itself, or the press it wraps."""
    while not isinstance(press, ScorerPress | None):
        press = getattr(press, "press", None)
    return press


def _is_ratio_free(press: BasePress | None, types: tuple[type, ...]) -> bool:
    """Whether a press scores with one of the types, itself or through AdaKV or CriticalAdaKV, which only select."""
    inner = press.press if isinstance(press, AdaKVPress | CriticalAdaKVPress) else press
    return inner is None or type(inner) in types


@contextmanager
def _random_state(seed: int | None) -> Iterator[None]:
    """Some kvpress presses use the global random state: seed it inside the block, restore it after."""
    with torch.random.fork_rng():
        if seed is not None:
            torch.manual_seed(seed)
        yield
