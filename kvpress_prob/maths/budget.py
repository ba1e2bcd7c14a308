r"""The budget: how much to draw so that, on average, the wanted number of distinct entries is kept.

``J(m)`` distinct entries are left after ``m`` draws from ``pi`` (arXiv 2608.28293, appendix F; the classical occupancy
problem)::

    E[J(m)] = sum_i 1 - (1 - pi_i)^m = sum_i -expm1(m log1p(-pi_i))

a systematic sample keeps entry ``i`` with probability ``q_i = min(1, lambda a_i)``, and the union of several samples
with ``1 - prod_k (1 - q_ki)``. All expectations increase in their one unknown, so each is solved by bisection
(``solve``). Heads that share one unknown form a *group*: all heads of a model (``allocation="global"``, Algorithm 2 of
the paper), the heads of a layer, or a single head.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvpress_prob.maths.groups import group_logsumexp, group_sum
from kvpress_prob.maths.solve import bisect, solve_scale

MAX_DRAWS = 10**15
"""Largest number of draws that is searched; integers up to here are exact in float64."""


def ratio_of_entries(entries: int, tokens: int) -> float:
    """The compression ratio at which a head keeps ``entries`` of ``tokens`` on average; 0 where they are no more.

    A millionth of an entry more, since kvpress rounds what is kept down.
    """
    return max(0.0, 1 - (entries + 1e-6) / tokens)


def expected_distinct(pi: Float[Tensor, "h t"], draws: Float[Tensor, " h"]) -> Float[Tensor, " h"]:
    """``E[J(m)]`` of each head for ``m = draws``; float64 in, float64 out."""
    return keep_probability(pi, draws).sum(-1)


def keep_probability(pi: Float[Tensor, "h t"], draws: Float[Tensor, " h"]) -> Float[Tensor, "h t"]:
    """``P(i kept) = 1 - (1 - pi_i)^m``, accurate for tiny ``pi_i`` and huge ``m``."""
    return -torch.expm1(draws.unsqueeze(-1) * torch.log1p(-pi))


def solve_draws(
    pi: Float[Tensor, "h t"], share: Float[Tensor, " h"], group: Int[Tensor, " h"], target: Float[Tensor, " g"]
) -> Int[Tensor, " h"]:
    """Number of draws per head whose expected distinct entries come closest to each group's target.

    Parameters
    ----------
    pi : Float[Tensor, "h t"]
        Proposals, float64; a row sums to 1, or to 0 for a head that draws nothing.
    share : Float[Tensor, "h"]
        Head ``h`` draws ``max(1, round(m share_h))`` times, with one ``m`` per group; all ones for the paper's rule.
    group : Int[Tensor, "h"]
        Group of each head, 0 to g - 1.
    target : Float[Tensor, "g"]
        Wanted sum of expected distinct entries of each group.

    Returns
    -------
    Int[Tensor, "h"]
        int64, at least 1 and at most ``MAX_DRAWS``. With equal shares ``|sum E[J] - target|`` is at most half an entry
        per head of the group, unless the target lies outside ``[heads, support]``: then 1 or ``MAX_DRAWS`` draws are
        returned.
    """
    groups = len(target)
    log_miss = torch.log1p(-pi)

    def draws(m: Tensor) -> Tensor:
        return (m.double()[group] * share).round().clamp(1, MAX_DRAWS)

    def total(m: Tensor) -> Tensor:
        return group_sum(-torch.expm1(draws(m).unsqueeze(-1) * log_miss).sum(-1), group, groups)

    low = torch.ones(groups, dtype=torch.int64, device=pi.device)
    low, high = bisect(total, target, low, torch.full_like(low, MAX_DRAWS), MAX_DRAWS.bit_length())
    closest = torch.where((total(low) - target).abs() <= (total(high) - target).abs(), low, high)
    return draws(torch.where(total(torch.full_like(low, MAX_DRAWS)) < target, MAX_DRAWS, closest)).long()


def solve_inclusion(
    weights: Float[Tensor, "h t"],
    group: Int[Tensor, " h"],
    target: Float[Tensor, " g"],
    at_least: Float[Tensor, " h"],
) -> Float[Tensor, "h t"]:
    """Inclusion probabilities ``q_i`` from weights ``a_i >= 0``: ``solve_log_inclusion`` without logarithms."""
    return solve_log_inclusion(weights.log(), group, target, at_least).exp()


def solve_log_inclusion(
    log_weights: Float[Tensor, "h t"],
    group: Int[Tensor, " h"],
    target: Float[Tensor, " g"],
    at_least: Float[Tensor, " h"],
) -> Float[Tensor, "h t"]:
    """Logarithms of inclusion probabilities ``q_i = min(1, lambda a_i)`` with one ``lambda`` per group and a given
    total.

    ``lambda``, the weights and the result stay logarithms, so sharp proposals neither underflow nor overflow: the
    sharper they are, the closer comes ``q`` to the choice of the group's largest weights.

    Parameters
    ----------
    log_weights : Float[Tensor, "h t"]
        ``log a_i``, float64. Entries with ``-inf`` are never kept.
    group : Int[Tensor, "h"]
        Group of each head, 0 to g - 1.
    target : Float[Tensor, "g"]
        Wanted sum of ``q`` over each group. Targets above the group's support keep the whole support.
    at_least : Float[Tensor, "h"]
        Smallest sum of ``q`` of a head, 0 or 1. A head with little weight is raised to it; the others give way.

    Returns
    -------
    Float[Tensor, "h t"]
        ``log q_i``, float64. The sum of ``q`` over a group equals its target to 1e-9 relative, unless ``at_least`` or
        the support forbid it.
    """
    support = log_weights > -torch.inf
    of_head = torch.logsumexp(log_weights, -1)
    floor = torch.where(of_head > -torch.inf, at_least.log() - of_head, -torch.inf)
    sums = group_logsumexp(of_head, group, len(target))
    # From where no group reaches a thousandth of an entry on.
    low = torch.where(sums.isfinite(), -sums, 0) - 7
    log_scale, reachable = solve_scale([log_weights], group, target, at_least, low)
    log_scale = torch.where((target > 0) & reachable, log_scale, -torch.inf)
    log_q = (torch.maximum(log_scale[group], floor).unsqueeze(-1) + log_weights).clamp_(max=0)
    whole = (target >= group_sum(support.sum(-1).double(), group, len(target)))[group].unsqueeze(-1) & support
    return torch.where(whole, 0, log_q)


def union_inclusion(
    parts: Sequence[Float[Tensor, "h t"]],
    group: Int[Tensor, " h"],
    target: Float[Tensor, " g"],
    at_least: Float[Tensor, " h"],
) -> Float[Tensor, "h t"]:
    """Inclusion probabilities of the union of independent draws, ``1 - prod_k (1 - min(1, c q_k))``, with one ``c`` per
    group and a given total.

    The parts' totals add up to the target and their draws overlap, so ``c >= 1`` hands the overlap back to all of them
    in proportion. Only where heads have to be raised to ``at_least`` does ``c`` fall below 1.

    Parameters
    ----------
    parts : sequence of Float[Tensor, "h t"]
        Logarithms of the inclusion probabilities ``q_k`` of every draw alone (``solve_log_inclusion``), float64.
    group : Int[Tensor, "h"]
        Group of each head, 0 to g - 1.
    target : Float[Tensor, "g"]
        Wanted sum over each group. Targets above the union's support keep the whole support.
    at_least : Float[Tensor, "h"]
        Smallest sum of a head, 0 or 1. A head below is raised in proportion; the others give way.

    Returns
    -------
    Float[Tensor, "h t"]
        float64.
    """
    low = torch.full_like(target, -7.0, dtype=torch.float64)
    log_c = solve_scale(parts, group, target, at_least, low)[0][group].unsqueeze(-1)
    missed = torch.ones_like(parts[0])
    for log_q in parts:
        missed.mul_(-torch.expm1((log_c + log_q).clamp_(max=0)))
    q = missed.neg_().add_(1)
    total = q.sum(-1)
    return q * torch.where((total > 0) & (total < at_least), at_least / total, 1).unsqueeze(-1)
