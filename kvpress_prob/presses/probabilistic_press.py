"""The press: a proposal from any scorer, a draw, real eviction, and weights for decoding."""

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvpress import BasePress, ScorerPress
from torch import Tensor
from transformers import PreTrainedModel

from kvpress_prob.hf import DecodingBudget, watch_prefills
from kvpress_prob.maths.draw import (
    ALLOCATIONS,
    COMBINES,
    SAMPLERS,
    Allocation,
    BudgetWeighting,
    Combine,
    Sampler,
)
from kvpress_prob.maths.importance import CORRECTIONS, Correction
from kvpress_prob.maths.proposals import check_temperature
from kvpress_prob.presses.checks import check_choice, check_ratio
from kvpress_prob.presses.component import Component, shares_of
from kvpress_prob.presses.compression import Compression
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
    combine : {"union", "sum", "max"}, default="union"
        How components share the budget: as independent draws whose union is kept, as a mixture, or by the largest.
    calibrate : bool, default=False
        Scale each head's weights so that they reproduce the total of its (first component's) proposal exactly.
    decoding : DecodingBudget, optional, default=None
        Bound the cache while decoding: layers that grow past the budget are sampled again, with this press' sampler,
        correction, temperature, uniform mix and sinks. None keeps every token that is appended.
    entries_per_head : int, optional, default=None
        The budget as entries that a head keeps on average, in place of ``compression_ratio``: of a context of t tokens,
        batch row by batch row, the share ``min(1, entries_per_head / t)``. With no more than ``n_sink + n_recent``
        entries those are all that is kept.

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
    combine: Combine = "union"
    calibrate: bool = False
    decoding: DecodingBudget | None = None
    entries_per_head: int | None = None
    report: CompressionReport | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self):
        self._check()

    @property
    def components(self) -> list[Component]:
        """The proposals that share the budget; one for a single scorer."""
        if isinstance(self.press, list):
            return self.press
        return [Component(self.press, 1.0, self.budget_weighting, self.proposal_temperature)]

    def _check(self) -> None:
        check_ratio(self.compression_ratio)
        if self.entries_per_head is not None:
            if not isinstance(self.entries_per_head, int) or self.entries_per_head < 1:
                raise ValueError(f"entries_per_head must be None or an integer >= 1, got {self.entries_per_head!r}")
            if self.compression_ratio:
                raise ValueError(
                    f"compression_ratio must be 0 where entries_per_head is given, got {self.compression_ratio}"
                )
        check_temperature("temperature", self.temperature)
        for name, value, allowed in (
            ("sampler", self.sampler, SAMPLERS),
            ("correction", self.correction, CORRECTIONS),
            ("allocation", self.allocation, ALLOCATIONS),
            ("combine", self.combine, COMBINES),
        ):
            check_choice(name, value, allowed)
        if self.correction == "counts" and self.sampler != "multinomial":
            raise ValueError(f"correction='counts' needs sampler='multinomial', got sampler={self.sampler!r}")
        if self.sampler == "top_k" and self.correction != "none":
            raise ValueError(f"sampler='top_k' needs correction='none', got correction={self.correction!r}")
        self._check_components()
        if not isinstance(self.max_weight, (int, float)) or not self.max_weight >= 1:
            raise ValueError(f"max_weight must be a number >= 1, got {self.max_weight!r}")
        if not isinstance(self.calibrate, bool):
            raise TypeError(f"calibrate must be True or False, got {self.calibrate!r}")
        if not isinstance(self.uniform_mix, (int, float)) or not 0 <= self.uniform_mix <= 1:
            raise ValueError(f"uniform_mix must be a number in [0, 1], got {self.uniform_mix!r}")
        for name, value in (("n_sink", self.n_sink), ("n_recent", self.n_recent)):
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        if self.seed is not None and not isinstance(self.seed, int):
            raise ValueError(f"seed must be None or an integer, got {self.seed!r}")
        if self.decoding is not None:
            if not isinstance(self.decoding, DecodingBudget):
                raise TypeError(f"decoding must be None or a DecodingBudget, got {type(self.decoding).__name__}")
            certain = self.decoding.interval + self.decoding.queries + self.n_sink
            if self.decoding.max_entries <= certain:
                raise ValueError(
                    f"decoding.max_entries must be more than interval + queries + n_sink = {certain}, "
                    f"got {self.decoding.max_entries}"
                )

    @property
    def evicts(self) -> bool:
        """Whether there is a budget at all."""
        return self.compression_ratio > 0 or self.entries_per_head is not None

    def ratio_of(self, tokens: int) -> float:
        """The compression ratio of a context."""
        if self.entries_per_head is None:
            return self.compression_ratio
        return max(0.0, 1 - self.entries_per_head / tokens)

    def _check_components(self) -> None:
        if isinstance(self.press, list):
            if not self.press or not all(isinstance(component, Component) for component in self.press):
                raise TypeError(f"press must be a ScorerPress or a list of Component, got {self.press!r}")
            for name, value in (
                ("budget_weighting", self.budget_weighting == "uniform"),
                ("proposal_temperature", self.proposal_temperature == 1),
            ):
                if not value:
                    raise ValueError(f"{name} must be given to each Component, got {getattr(self, name)!r}")
            if len(self.press) > 1 and self.sampler == "top_k" and self.combine == "union":
                raise ValueError("sampler='top_k' of several components needs combine='sum' or 'max', got 'union'")
        for component in self.components:
            component.check()
        shares_of(self.components, self.compression_ratio)

    def prepare_scorers(self, compression_ratio: float) -> None:
        """Tell the scorers the ratio: some (StreamingLLM, CriticalKV) score differently at different ratios."""
        for component in self.components:
            component.press.compression_ratio = compression_ratio

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
        self.report = None
        self.post_init_from_model(model)
        self.prepare_scorers(self.compression_ratio)
        with watch_prefills(model, lambda: Compression(self)):
            yield
