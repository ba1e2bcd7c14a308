"""Plain bisections over every entry: what the solvers of ``maths.budget`` must agree with."""

import torch

from kvpress_prob.maths.groups import group_logsumexp, group_sum

BISECTIONS = 100


def plain_log_inclusion(log_weights, group, target, at_least):
    groups = len(target)
    support = log_weights > -torch.inf
    of_head = torch.logsumexp(log_weights, -1)
    floor = torch.where(of_head > -torch.inf, at_least.log() - of_head, -torch.inf)

    def inclusion(log_scale):
        return (torch.maximum(log_scale[group], floor).unsqueeze(-1) + log_weights).clamp_(max=0)

    def total(log_scale):
        return group_sum(inclusion(log_scale).exp_().sum(-1), group, groups)

    # Bisection on log lambda: from where no group reaches a thousandth of an entry to where the smallest weight
    # saturates.
    smallest = torch.full((groups,), torch.inf, dtype=torch.float64, device=log_weights.device)
    smallest = smallest.scatter_reduce(0, group, torch.where(support, log_weights, torch.inf).amin(-1), "amin")
    sums = group_logsumexp(of_head, group, groups)
    low = torch.where(sums.isfinite(), -sums, 0) - 7
    high = torch.where(smallest.isfinite(), -smallest, 0).maximum(low) + 1e-9
    reachable = (target > 0) & (total(low) < target)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = total(middle) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    log_q = inclusion(torch.where(reachable, high, -torch.inf))
    whole = (target >= group_sum(support.sum(-1).double(), group, groups))[group].unsqueeze(-1) & support
    return torch.where(whole, 0, log_q)


def plain_union(parts, group, target, at_least):
    groups = len(target)

    def union(log_c):
        missed = torch.ones_like(parts[0])
        for log_q in parts:
            missed = missed * -torch.expm1((log_c[group].unsqueeze(-1) + log_q).clamp(max=0))
        q = 1 - missed
        total = q.sum(-1)
        return q * torch.where((total > 0) & (total < at_least), at_least / total, 1).unsqueeze(-1)

    def total(log_c):
        return group_sum(union(log_c).sum(-1), group, groups)

    # Bisection on log c, up to where the smallest probability saturates.
    smallest = torch.full((groups,), torch.inf, dtype=torch.float64, device=group.device)
    for log_q in parts:
        smallest = smallest.scatter_reduce(0, group, torch.where(log_q > -torch.inf, log_q, torch.inf).amin(-1), "amin")
    low = torch.full_like(smallest, -7.0)
    high = torch.where(smallest.isfinite(), -smallest, 0)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        below = total(middle) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return union(high)
