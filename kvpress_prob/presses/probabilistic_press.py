"""The press: a proposal from any scorer, a draw, real eviction, and weights for decoding."""

import math
import warnings
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial

from kvpress import BasePress, ScorerPress
from torch import Tensor
from transformers import PreTrainedModel

from kvpress_prob.hf import (
    CacheBudget,
    LayerPrefill,
    Prefill,
    Upcoming,
    bound_passes,
    full_attention_layers,
    watch_prefills,
)
from kvpress_prob.hf.borrowed import borrowed
from kvpress_prob.maths.arguments import check_flag, check_integer, check_ratio, check_seed
from kvpress_prob.maths.budget import ratio_of_entries
from kvpress_prob.maths.draw import Allocation, BudgetWeighting, DrawSettings, Sampler
from kvpress_prob.maths.importance import Correction
from kvpress_prob.presses.bounded_settings import check_budget
from kvpress_prob.presses.bounding import BoundedBlock
from kvpress_prob.presses.component import Component, shares_of
from kvpress_prob.presses.compressing import compress
from kvpress_prob.presses.gathering import Gathered, Gathering, check_sources
from kvpress_prob.presses.later import Later
from kvpress_prob.presses.report import CompressionReport


@dataclass
class ProbabilisticPress(BasePress):
    """
    Probabilistic eviction with decode-time correction.

    At the end of a prefill a budget of entries is drawn from each head's proposal, everything else is evicted (each
    head stores a different number of entries), and decoding adds the kept entries' log importance weights to the
    attention logits.

    Based on A Probabilistic Interpretation of KV Cache Eviction (https://arxiv.org/abs/2608.28293). The paper to the
    letter is ``sampler="multinomial", correction="counts"``; the defaults have less variance at the same budget.

    Parameters
    ----------
    press : ScorerPress or list of Component
        Any kvpress scorer. What its scores are (weights, their logarithms or logits) is known or declared, see
        ``Component.scores_are``; entries that it protects are kept with weight 1. Several scorers that share the budget
        are given as components, which then have their own ``budget_weighting`` and ``proposal_temperature``.
    compression_ratio : float, default=0.0
        Fraction of key-value pairs to evict, over all heads of all full-attention layers. Sliding-window layers are
        left alone.
    sampler : {"systematic", "multinomial", "top_k"}, default="systematic"
        Without replacement and with an exact budget, counts of independent draws, or no draw at all: the largest
        proposal weights, for ``correction="none"``.
    correction : {"inclusion", "counts", "none"}, default="inclusion"
        Weight of a kept entry: one over its inclusion probability, its count over the expected count, or 1.
    temperature : float, default=1.0
        Importance temperature: log-weights are divided by it. 1 corrects fully, infinity not at all.
    proposal_temperature : float, default=1.0
        Weights s become s^(1/T), logits softmax(s/T); towards 0 the draw approaches top-k.
    uniform_mix : float, default=0.0
        Share of the uniform distribution in each head's proposal.
    allocation : {"global", "layer", "head"}, default="global"
        What the compression ratio holds for.
    budget_weighting : {"uniform", "score"}, default="uniform"
        Draw from normalised proposals with one number of draws for all heads, or from each head in proportion to its
        scores' total.
    n_sink : int, default=0
        Number of first entries that are always kept.
    n_recent : int, default=0
        Number of last entries that are always kept.
    seed : int, optional, default=None
        Seed of the draw. None takes a fresh one from the operating system each time (see ``report.seed``); the global
        random state is never touched. Every batch row uses the same seed, so it is compressed as it would be alone.
    max_weight : float, default=inf
        Largest importance weight of a kept entry, at least 1. A cap trades a little bias for less variance.
    entries_per_head : int, optional, default=None
        The budget as entries that a head keeps on average, in place of ``compression_ratio``: of a context of t tokens,
        batch row by batch row, the share ``min(1, entries_per_head / t)``. With no more than ``n_sink + n_recent``
        entries those are all that is kept.
    measure_dropped_mass : bool, default=False
        Report, per head, the newest rows' attention to what was evicted (``report.dropped_mass``).
    budget : CacheBudget, optional, default=None
        Bound the cache at all times, or only while decoding. None compresses once, after the prefill, and keeps every
        token that is appended. With a budget, ``sampler="systematic"`` draws by priority, and scores that change are
        drawn from again and again. ``compression_ratio`` is then what shares that depend on it are asked for.

    Attributes
    ----------
    report : CompressionReport or None
        Figures of the last compressed prefill.
    """

    press: ScorerPress | list[Component]
    compression_ratio: float = 0.0
    sampler: Sampler = "systematic"
    correction: Correction = "inclusion"
    temperature: float = 1.0
    proposal_temperature: float = 1.0
    uniform_mix: float = 0.0
    allocation: Allocation = "global"
    budget_weighting: BudgetWeighting = "uniform"
    n_sink: int = 0
    n_recent: int = 0
    seed: int | None = None
    max_weight: float = math.inf
    entries_per_head: int | None = None
    measure_dropped_mass: bool = False
    budget: CacheBudget | None = None
    report: CompressionReport | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        self._check()

    @property
    def components(self) -> list[Component]:
        """The proposals that share the budget; one for a single scorer."""
        if isinstance(self.press, list):
            return self.press
        return [Component(self.press, 1.0, self.budget_weighting, self.proposal_temperature)]

    @property
    def draw_settings(self) -> DrawSettings:
        """How samples are drawn and weighted."""
        return DrawSettings(
            self.sampler, self.correction, self.temperature, self.max_weight, self.uniform_mix, self.allocation
        )

    def gathering(self, compression_ratio: float) -> Gathering:
        """What gathers this press' proposals from a prefill."""
        return Gathering(
            self.components,
            compression_ratio,
            ratio_of=partial(self.ratio_of, compression_ratio),
            uniform_mix=self.uniform_mix,
            n_sink=self.n_sink,
            n_recent=self.n_recent,
            measure_dropped_mass=self.measure_dropped_mass,
        )

    def draw(
        self, gathered: Gathered | None, prefill: Prefill, compression_ratio: float, seed: int | None
    ) -> CompressionReport:
        """Compress the prefill's cache by a draw from what was gathered; with ``entries_per_head`` at ratios of its
        own, one for every batch row."""
        lengths = prefill.valid.sum(-1).tolist()
        return compress(
            gathered,
            prefill,
            self.components,
            self.draw_settings,
            [self.ratio_of(compression_ratio, length) for length in lengths],
            seed,
            decoding=self.budget,
            n_sink=self.n_sink,
        )

    def _check(self) -> None:
        check_ratio(self.compression_ratio)
        if self.entries_per_head is not None:
            check_integer("entries_per_head", self.entries_per_head, 1, optional=True)
            if self.compression_ratio:
                raise ValueError(
                    f"compression_ratio must be 0 where entries_per_head is given, got {self.compression_ratio}"
                )
        check_seed("seed", self.seed, optional=True)
        for name, value in (("n_sink", self.n_sink), ("n_recent", self.n_recent)):
            check_integer(name, value, 0)
        check_flag("measure_dropped_mass", self.measure_dropped_mass)
        settings = self.draw_settings  # checks itself
        self._check_components()
        if len(self.components) > 1 and settings.sampler == "top_k":
            raise ValueError(f"sampler='top_k' draws nothing and takes one component, got {len(self.components)}")
        if self.budget is not None:
            if not isinstance(self.budget, CacheBudget):
                raise TypeError(f"budget must be None or a CacheBudget, got {type(self.budget).__name__}")
            check_budget(self)

    @property
    def evicts(self) -> bool:
        """Whether there is a budget at all."""
        return self.compression_ratio > 0 or self.entries_per_head is not None

    def ratio_of(self, compression_ratio: float, tokens: int) -> float:
        """The compression ratio of a context: what ``entries_per_head`` is of it, or the one that is given."""
        if self.entries_per_head is None:
            return compression_ratio
        return ratio_of_entries(self.entries_per_head, tokens)

    def _check_components(self) -> None:
        if isinstance(self.press, list):
            if not self.press or not all(isinstance(component, Component) for component in self.press):
                raise TypeError(f"press must be a ScorerPress or a list of Component, got {self.press!r}")
            for name, default in (("budget_weighting", "uniform"), ("proposal_temperature", 1)):
                if getattr(self, name) != default:
                    raise ValueError(f"{name} must be given to each Component, got {getattr(self, name)!r}")
        for component in self.components:
            component.check()
        shares_of(self.components, self.compression_ratio)

    def post_init_from_model(self, model: PreTrainedModel) -> None:
        for component in self.components:
            component.press.post_init_from_model(model)

    def compress(self, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Not a per-layer method: the budget is shared by all layers."""
        raise NotImplementedError("ProbabilisticPress compresses whole caches: use it as the outermost press")

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Generator[None, None, None]:
        """Compress every prefill inside the block. Decoding works inside and after it.

        Raises
        ------
        TypeError, ValueError
            For parameters, models and caches that are not supported; before anything has run.
        """
        self._check()
        model = getattr(model, "_orig_mod", model)  # of torch.compile(model)
        self.report = None
        self.post_init_from_model(model)
        with ExitStack() as stack:
            for scorer in {id(component.press): component.press for component in self.components}.values():
                stack.enter_context(borrowed(scorer, "compression_ratio", self.compression_ratio))
            if self.budget is not None and self.budget.start == "prefill":
                if not full_attention_layers(model):
                    name = type(model).__name__
                    warnings.warn(f"every layer of {name} has a sliding window: nothing is evicted", stacklevel=2)
                block = BoundedBlock(self)
                stack.enter_context(bound_passes(model, block, self.budget))
                yield
                block.end()
            else:
                stack.enter_context(watch_prefills(model, lambda: _Prefill(self), Later(self.evicts)))
                yield


class _Prefill:
    """One prefill under a press (a ``PrefillWatcher``)."""

    def __init__(self, press: ProbabilisticPress):
        self.press = press
        self.gathering: Gathering | None = None

    def begin(self, upcoming: Upcoming) -> None:
        """Refuse what a component could not read once the model has run."""
        if self.press.evicts:
            check_sources(self.press.components, upcoming)

    def layer(self, layer: LayerPrefill) -> None:
        if self.press.evicts:
            if self.gathering is None:
                self.gathering = self.press.gathering(self.press.compression_ratio)
            self.gathering.layer(layer)

    def end(self, prefill: Prefill) -> None:
        """Compress the prefill's own cache; the press writes its report."""
        press = self.press
        gathered = None if self.gathering is None else self.gathering.complete(prefill)
        press.report = press.draw(gathered, prefill, press.compression_ratio, press.seed)
