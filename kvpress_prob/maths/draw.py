r"""One call from proposals to a weighted sample, for every head of one sequence (arXiv 2608.28293, Algorithm 2).

Protected entries (the take-all stratum) are kept with weight 1 and leave both the proposals and the budget; the rest of
the budget is solved for and drawn by the chosen sampler, and the chosen correction turns the draw into log-weights.

Several proposals share the budget as if each had drawn its share alone. With shares ``s_k`` and inclusion probabilities
``q_k`` at ``s_k`` of the budget::

    q = 1 - prod_k (1 - c q_k)                  c >= 1 makes up for the overlap

Multinomial draws from a mixture are the union of draws from its components, so there the proposals are mixed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from kvpress_prob.maths import budget, importance, sampling
from kvpress_prob.maths.arguments import check_choice, check_fraction, check_positive, is_number
from kvpress_prob.maths.groups import group_logsumexp, group_max, group_sum
from kvpress_prob.maths.importance import Correction
from kvpress_prob.maths.proposals import log_normalise

Sampler = Literal["systematic", "multinomial", "top_k"]
SAMPLERS: tuple[Sampler, ...] = ("systematic", "multinomial", "top_k")
Allocation = Literal["global", "layer", "head"]
ALLOCATIONS: tuple[Allocation, ...] = ("global", "layer", "head")
BudgetWeighting = Literal["uniform", "score"]
BUDGET_WEIGHTINGS: tuple[BudgetWeighting, ...] = ("uniform", "score")


@dataclass(frozen=True)
class DrawSettings:
    """How a sample is drawn and weighted.

    Attributes
    ----------
    sampler : {"systematic", "multinomial", "top_k"}
        See ``sampling``. ``top_k`` keeps each group's largest amounts, draws nothing and takes no correction.
    correction : {"inclusion", "counts", "none"}
        See ``importance``. ``counts`` needs the multinomial sampler.
    temperature : float
        Importance temperature (``importance.temper``).
    max_weight : float
        Largest importance weight, at least 1 (``importance.truncate``).
    uniform_mix : float
        Share of the uniform distribution in each head's proposal (``proposals.log_proposal``).
    allocation : {"global", "layer", "head"}
        Heads that share a budget (``groups_of``).

    Raises
    ------
    ValueError
        For a value out of range, or two that do not go together.
    """

    sampler: Sampler = "systematic"
    correction: Correction = "inclusion"
    temperature: float = 1.0
    max_weight: float = math.inf
    uniform_mix: float = 0.0
    allocation: Allocation = "global"

    def __post_init__(self):
        check_choice("sampler", self.sampler, SAMPLERS)
        check_choice("correction", self.correction, importance.CORRECTIONS)
        check_choice("allocation", self.allocation, ALLOCATIONS)
        check_positive("temperature", self.temperature)
        check_fraction("uniform_mix", self.uniform_mix)
        if not is_number(self.max_weight) or not self.max_weight >= 1:
            raise ValueError(f"max_weight must be a number >= 1, got {self.max_weight!r}")
        if self.correction == "counts" and self.sampler != "multinomial":
            raise ValueError(f"correction='counts' needs sampler='multinomial', got sampler={self.sampler!r}")
        if self.sampler == "top_k" and self.correction != "none":
            raise ValueError(f"sampler='top_k' needs correction='none', got correction={self.correction!r}")


@dataclass(frozen=True)
class Proposal:
    """What to draw from.

    Attributes
    ----------
    weights : Float[Tensor, "h t"]
        Non-negative, float64; zero in the take-all stratum. Or their logarithms.
    share : float
        Share of the budget; the shares of all proposals sum to 1.
    budget_weighting : "uniform" or "score"
        Normalise the weights of each head first, or draw from a head in proportion to its total weight.
    logarithms : bool
        Whether ``weights`` are logarithms: what a sharp proposal needs to neither underflow nor overflow.
    """

    weights: Float[Tensor, "h t"]
    share: float = 1.0
    budget_weighting: BudgetWeighting = "uniform"
    logarithms: bool = False

    @property
    def log_weights(self) -> Float[Tensor, "h t"]:
        """``log a_i``; of each head's weights over their sum where the budget weighting is uniform."""
        log_a = self.weights if self.logarithms else self.weights.log()
        return log_normalise(log_a) if self.budget_weighting == "uniform" else log_a


@dataclass(frozen=True)
class Draw:
    """A weighted sample of the entries of every head.

    Attributes
    ----------
    kept : Bool[Tensor, "h t"]
        Kept entries; at least one per head that has a valid entry.
    log_w : Float[Tensor, "h t"]
        float32 log importance weights of the kept entries, 0 elsewhere and in the take-all stratum.
    probability : Float[Tensor, "h t"]
        float64 inclusion probability of every entry, whatever the correction.
    draws : Int[Tensor, "h"] or None
        Number of draws per head of the multinomial sampler.
    """

    kept: Bool[Tensor, "h t"]
    log_w: Float[Tensor, "h t"]
    probability: Float[Tensor, "h t"]
    draws: Int[Tensor, " h"] | None


def groups_of(allocation: Allocation, layer: Int[Tensor, " h"]) -> Int[Tensor, " h"]:
    """Budget group of every head: one for all, one per layer, or one per head. ``layer`` counts from 0."""
    if allocation == "global":
        return torch.zeros_like(layer)
    if allocation == "layer":
        return layer
    return torch.arange(len(layer), device=layer.device)


def draw(
    proposals: Sequence[Proposal],
    take_all: Bool[Tensor, "h t"],
    group: Int[Tensor, " h"],
    *,
    keep_fraction: float,
    settings: DrawSettings,
    stream: Int64[Tensor, " h"],
    groups: int | None = None,
) -> Draw:
    """Draw the kept entries of every head and their log-weights.

    Parameters
    ----------
    proposals : sequence of Proposal
        One for the ``top_k`` sampler.
    take_all : Bool[Tensor, "h t"]
        Entries that are kept for certain. They count towards the budget.
    group : Int[Tensor, "h"]
        Budget group of each head (``groups_of``).
    keep_fraction : float
        ``1 - r`` in (0, 1]: the wanted mean of kept / t over the heads of each group.
    settings : DrawSettings
    stream : Int64[Tensor, "h"]
        One stream of random numbers a head (``random.streams``): a head's draw follows from its budget and its stream
        alone, whatever other heads or batch rows are drawn beside it.
    groups : int, optional
        Number of groups; None asks the device.
    """
    groups = int(group.max()) + 1 if groups is None else groups
    t = take_all.shape[1]
    protected = take_all.sum(-1).double()
    budgets = group_sum(keep_fraction * t - protected, group, groups).clamp(min=0)
    proposals = [proposal for proposal in proposals if proposal.share]
    shares, parts = [it.share for it in proposals], [it.log_weights for it in proposals]
    uniform = proposals[0].budget_weighting == "uniform"
    if len(parts) > 1 and settings.sampler == "multinomial":
        amounts = [math.log(share) + _log_amounts(it, group, groups) for share, it in zip(shares, parts, strict=True)]
        shares, parts, uniform = [1.0], [torch.stack(amounts).logsumexp(0)], False
    # A head whose only entries are drawn ones must keep one; a head with protected entries may draw none.
    drawable = torch.stack([part > -torch.inf for part in parts]).any(0)
    at_least = (drawable.any(-1) & (protected == 0)).double()
    pi = log_normalise(parts[0]).exp()
    counts = draws = whole = None
    if settings.sampler == "multinomial":
        of_head = drawable.any(-1).double().log() if uniform else parts[0].logsumexp(-1)
        share = (of_head - group_max(of_head, group, groups)[group]).exp()
        counts, draws, whole = _multinomial(pi, share, drawable, group, budgets, at_least, stream)
        probability = torch.where(whole, 1, budget.keep_probability(pi, draws.double()))
        sampled = counts > 0
    elif settings.sampler == "systematic":
        probability = _inclusion(shares, parts, group, budgets, at_least)
        sampled = sampling.systematic_sample(probability, sampling.offsets(stream))
    elif len(parts) == 1:
        sampled = _largest(parts[0], group, budgets, at_least)
        probability = sampled.double()
    else:
        raise ValueError(f"sampler='top_k' draws nothing and takes one proposal, got {len(parts)}")

    if settings.correction == "inclusion":
        log_w = importance.log_weights_from_inclusion(sampled, probability)
    elif counts is not None and draws is not None and whole is not None and settings.correction == "counts":
        log_w = torch.where(whole, 0, importance.log_weights_from_counts(counts, pi, draws))
    else:
        log_w = torch.zeros_like(pi)
    log_w = importance.truncate(importance.temper(log_w, settings.temperature), settings.max_weight)
    return Draw(sampled | take_all, log_w.float(), torch.where(take_all, 1, probability), draws)


def _inclusion(
    shares: Sequence[float], parts: Sequence[Tensor], group: Tensor, budgets: Tensor, at_least: Tensor
) -> Tensor:
    """Inclusion probabilities [h t] of one proposal, or of the union of several."""
    if len(parts) == 1:
        return budget.solve_log_inclusion(parts[0], group, shares[0] * budgets, at_least).exp()
    none = torch.zeros_like(at_least)
    alone = [
        budget.solve_log_inclusion(part, group, share * budgets, none)
        for share, part in zip(shares, parts, strict=True)
    ]
    return budget.union_inclusion(alone, group, budgets, at_least)


def _log_amounts(log_weights: Tensor, group: Tensor, groups: int) -> Tensor:
    """Logarithms of weights that sum to 1 over a group."""
    total = group_logsumexp(log_weights.logsumexp(-1), group, groups)
    return log_weights - torch.where(total > -torch.inf, total, 0)[group].unsqueeze(-1)


def _largest(log_amounts: Tensor, group: Tensor, budgets: Tensor, at_least: Tensor) -> Tensor:
    """The largest amounts [h t] of every group, as many as its budget, and at least ``at_least`` of every head."""
    t = log_amounts.shape[1]
    # A head's first entries rank before all others; ties go to the earlier head, then to the earlier entry.
    first = torch.zeros_like(log_amounts, dtype=torch.bool)
    first.scatter_(-1, log_amounts.argmax(-1, keepdim=True), at_least.bool().unsqueeze(-1))
    kept = torch.zeros_like(first)
    for index, size in enumerate(budgets.round().long().tolist()):
        heads = (group == index).nonzero().squeeze(-1)
        ranked = torch.where(first[heads], torch.inf, log_amounts[heads]).flatten()
        best = torch.argsort(ranked, descending=True, stable=True)[: max(size, int(first[heads].sum()))]
        chosen = torch.zeros(len(heads) * t, dtype=torch.bool, device=log_amounts.device)
        chosen[best] = True
        kept[heads] = chosen.view(-1, t)
    return kept & (log_amounts > -torch.inf)


def _multinomial(
    pi: Tensor,
    share: Tensor,
    support: Tensor,
    group: Tensor,
    budgets: Tensor,
    at_least: Tensor,
    stream: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts [h t], draws [h], and which entries [h t] are kept for certain because the budget covers a group's
    support."""
    draws = budget.solve_draws(pi, share / share.mean(), group, budgets)
    draws = torch.where(support.any(-1) & ((budgets > 0)[group] | (at_least > 0)), draws, 0)
    counts = sampling.multinomial_counts(pi, draws, stream)
    entries = group_sum(support.sum(-1).double(), group, len(budgets))
    whole = (budgets >= entries)[group].unsqueeze(-1) & support
    return torch.where(whole, counts.clamp(min=1), counts), draws, whole
