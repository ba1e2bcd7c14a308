"""One call from proposals to a weighted sample, for every head of one sequence (arXiv 2608.28293, Algorithm 2).

Protected entries (the take-all stratum) are kept with weight 1 and leave both the proposal and the budget; the rest of
the budget is solved for and drawn by the chosen sampler, and the chosen correction turns the draw into log-weights.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpress_prob.maths import budget, importance, sampling
from kvpress_prob.maths.importance import Correction
from kvpress_prob.maths.proposals import normalise

Sampler = Literal["systematic", "multinomial"]
SAMPLERS: tuple[Sampler, ...] = ("systematic", "multinomial")
Allocation = Literal["global", "layer", "head"]
ALLOCATIONS: tuple[Allocation, ...] = ("global", "layer", "head")
BudgetWeighting = Literal["uniform", "score"]
BUDGET_WEIGHTINGS: tuple[BudgetWeighting, ...] = ("uniform", "score")


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
    """Budget group of every head: one for all, one per layer, or one per head."""
    if allocation == "global":
        return torch.zeros_like(layer)
    if allocation == "layer":
        return layer.unique(return_inverse=True)[1]
    return torch.arange(len(layer), device=layer.device)


def draw(
    weights: Float[Tensor, "h t"],
    take_all: Bool[Tensor, "h t"],
    group: Int[Tensor, " h"],
    *,
    keep_fraction: float,
    sampler: Sampler,
    correction: Correction,
    temperature: float,
    budget_weighting: BudgetWeighting,
    generator: torch.Generator,
) -> Draw:
    """Draw the kept entries of every head and their log-weights.

    Parameters
    ----------
    weights : Float[Tensor, "h t"]
        Non-negative proposal weights, float64; zero in the take-all stratum.
    take_all : Bool[Tensor, "h t"]
        Entries that are kept for certain. They count towards the budget.
    group : Int[Tensor, "h"]
        Budget group of each head (``groups_of``).
    keep_fraction : float
        ``1 - r`` in (0, 1]: the wanted mean of kept / t over the heads of each group.
    sampler, correction, temperature
        See ``sampling`` and ``importance``; ``counts`` needs the multinomial sampler.
    budget_weighting : "uniform" or "score"
        Normalise the weights of each head first, or draw from a head in proportion to its total weight.
    generator : torch.Generator
        CPU generator; consumed alike on every device.
    """
    groups = int(group.max()) + 1
    protected = take_all.sum(-1).double()
    budgets = budget.group_sum(keep_fraction * weights.shape[1] - protected, group, groups).clamp(min=0)
    # A head whose only entries are drawn ones must keep one; a head with protected entries may draw none.
    at_least = ((weights > 0).any(-1) & (protected == 0)).double()
    if sampler == "systematic":
        amounts = normalise(weights) if budget_weighting == "uniform" else weights
        probability = budget.solve_inclusion(amounts, group, budgets, at_least)
        offset = sampling.offsets(len(group), generator).to(weights.device)
        sampled = sampling.systematic_sample(probability, offset)
        counts = draws = whole = None
    else:
        share = weights.sum(-1) if budget_weighting == "score" else (weights > 0).any(-1).double()
        pi = normalise(weights)
        counts, draws, whole = _multinomial(pi, share, group, budgets, at_least, generator)
        probability = torch.where(whole, 1, budget.keep_probability(pi, draws.double()))
        sampled = counts > 0

    if correction == "none":
        log_w = torch.zeros_like(weights)
    elif correction == "inclusion":
        log_w = importance.log_weights_from_inclusion(sampled, probability)
    elif counts is not None and draws is not None and whole is not None:
        log_w = importance.log_weights_from_counts(counts, normalise(weights), draws)
        log_w = torch.where(whole, 0, log_w)
    else:
        raise ValueError("correction='counts' needs sampler='multinomial', got sampler='systematic'")
    log_w = importance.temper(log_w, temperature).float()
    return Draw(sampled | take_all, log_w, torch.where(take_all, 1, probability), draws)


def _multinomial(
    pi: Tensor, share: Tensor, group: Tensor, budgets: Tensor, at_least: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Counts [h t], draws [h], and which entries [h t] are kept for certain because the budget covers a group's
    support."""
    draws = budget.solve_draws(pi, share / share.mean(), group, budgets)
    draws = torch.where((share > 0) & ((budgets > 0)[group] | (at_least > 0)), draws, 0)
    counts = sampling.multinomial_counts(pi, draws, generator)
    support = budget.group_sum((pi > 0).sum(-1).double(), group, len(budgets))
    whole = (budgets >= support)[group].unsqueeze(-1) & (pi > 0)
    return torch.where(whole, counts.clamp(min=1), counts), draws, whole
