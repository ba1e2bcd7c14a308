"""Gathering proposals while a prefill runs; nothing is drawn and nothing is changed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from kvpress import ScorerPress
from torch import Tensor

from kvpress_prob.hf import LayerPrefill, Prefill, Upcoming
from kvpress_prob.presses.attention_press import AttentionPress
from kvpress_prob.presses.component import Component
from kvpress_prob.presses.dropped_mass import newest_attention
from kvpress_prob.presses.scoring import LayerScores, check_flags, log_weights, score_layer
from kvpress_prob.sources.query_rows import CheckedSource


@dataclass(frozen=True)
class Gathered:
    """What can be drawn from: of one prefill, at any ratio that its scorers have scored for, with any seed.

    Attributes
    ----------
    log_weights : list of list of Float64[Tensor, "b hkv t"]
        Log-weights of every layer, by component; -inf in the take-all stratum and at padding.
    take_all : list of Bool[Tensor, "b hkv t"]
        What is kept for certain in every layer.
    attention : list of Float[Tensor, "b hkv t"]
        ``newest_attention`` of every layer, or nothing where it was not asked for.
    """

    log_weights: list[list[Tensor]]
    take_all: list[Tensor]
    attention: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class GatheringKey:
    """What gathered proposals depend on besides the prefill; keys that are equal gather the same.

    Attributes
    ----------
    scorers : list of (type, dict, float, str or None)
        Classes of the scorers and their attributes, their proposal temperatures and what their scores are.
    compression_ratio, uniform_mix, n_sink, n_recent, measure_dropped_mass
        As in ``Gathering``.
    """

    scorers: list[tuple[type, dict[str, Any], float, str | None]]
    compression_ratio: float
    uniform_mix: float
    n_sink: int
    n_recent: int
    measure_dropped_mass: bool


class Gathering:
    """Scores of a prefill's layers, one after the other, and what they come to.

    Parameters
    ----------
    components : sequence of Component
    compression_ratio : float
        Of the press; results are shared by it.
    ratio_of : callable
        What the scorers are told of a batch row, by its number of tokens.
    uniform_mix : float
    n_sink, n_recent : int
        First and last entries of every head that are always kept.
    measure_dropped_mass : bool
        Note the attention of the newest rows too.
    """

    def __init__(
        self,
        components: Sequence[Component],
        compression_ratio: float,
        *,
        ratio_of: Callable[[int], float],
        uniform_mix: float = 0.0,
        n_sink: int = 0,
        n_recent: int = 0,
        measure_dropped_mass: bool = False,
    ):
        self.components = components
        self.compression_ratio, self.ratio_of = compression_ratio, ratio_of
        self.uniform_mix = uniform_mix
        self.n_sink, self.n_recent = n_sink, n_recent
        self.measure_dropped_mass = measure_dropped_mass
        self.attention: list[Tensor] = []
        self.padding: list[int] | None = None  # of every batch row, the same in every layer
        # Scores of every layer, by component; empty for one that needs the finished prefill.
        self.scores: list[list[LayerScores]] = [[] for _ in components]

    @property
    def key(self) -> GatheringKey:
        """By what the results may be shared."""
        scorers = []
        for component in self.components:
            own = {name: value for name, value in vars(component.press).items() if name != "compression_ratio"}
            scorers.append((type(component.press), own, component.proposal_temperature, component.scores_are))
        protected = self.n_sink, self.n_recent
        return GatheringKey(scorers, self.compression_ratio, self.uniform_mix, *protected, self.measure_dropped_mass)

    def layer(self, layer: LayerPrefill) -> None:
        """Score one layer."""
        if self.measure_dropped_mass:
            self.attention.append(newest_attention(layer))
        if self.padding is None:
            self.padding = [0] * len(layer.keys) if layer.valid is None else (~layer.valid).sum(-1).tolist()
        ratios = [self.ratio_of(layer.keys.shape[2] - padding) for padding in self.padding]
        for component, scores in zip(self.components, self.scores, strict=True):
            if not _needs_pass(component.press):
                scores.append(score_layer(component, layer, self.padding, ratios))

    def complete(self, prefill: Prefill) -> Gathered:
        """Score what needs the finished prefill, and turn scores into log-weights.

        The prefill's cache is read and not changed.
        """
        for index, component in enumerate(self.components):
            if _needs_pass(component.press):
                component.press.compression_ratio = self.compression_ratio
                everything = cast(AttentionPress, component.press).score_context(prefill)
                self.scores[index] = [LayerScores(it, torch.zeros_like(it, dtype=torch.bool)) for it in everything]
        gathered = Gathered([[] for _ in self.components], [], self.attention)
        flags: list[list[Tensor]] = [[] for _ in self.components]
        for scores in zip(*self.scores, strict=True):
            self._add_layer(gathered, scores, prefill.valid, flags)
        if prefill.layers:
            check_flags(self.components, prefill.layers, flags)
        return gathered

    def _add_layer(
        self, gathered: Gathered, scores: tuple[LayerScores, ...], valid: Tensor, flags: list[list[Tensor]]
    ) -> None:
        """Log-weights of one layer; what any component protects is in the take-all stratum of all."""
        valid = valid.to(scores[0].scores.device)
        drawable = valid.unsqueeze(1).expand_as(scores[0].scores)
        certain = valid.cumsum(-1).unsqueeze(1) <= self.n_sink
        certain = certain | (torch.arange(valid.shape[1], 0, -1, device=valid.device) <= self.n_recent)
        for part in scores:
            certain = certain | part.protected
        take_all = certain & drawable
        for index, (component, part) in enumerate(zip(self.components, scores, strict=True)):
            log_a, wrong = log_weights(component, part.scores, drawable & ~take_all, self.uniform_mix)
            gathered.log_weights[index].append(log_a)
            flags[index].append(wrong)
        gathered.take_all.append(take_all)


def check_sources(components: Sequence[Component], upcoming: Upcoming) -> None:
    """Refuse what a component's query source could not read once the model has run."""
    for component in components:
        source = getattr(component.press, "source", None)
        if isinstance(source, CheckedSource):
            source.check(upcoming)


def _needs_pass(press: ScorerPress) -> bool:
    return isinstance(press, AttentionPress) and press.needs_pass
