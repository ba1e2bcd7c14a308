"""Sums over the heads of a group, the heads that share one unknown of the budget."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def group_sum(per_head: Float[Tensor, " h"], group: Int[Tensor, " h"], groups: int) -> Float[Tensor, " g"]:
    """Sum a quantity of each head over the heads of a group."""
    return torch.zeros(groups, dtype=per_head.dtype, device=per_head.device).index_add_(0, group, per_head)


def group_max(per_head: Float[Tensor, " h"], group: Int[Tensor, " h"], groups: int) -> Float[Tensor, " g"]:
    """Largest finite quantity of the heads of a group; 0 where there is none."""
    largest = torch.full((groups,), -torch.inf, dtype=per_head.dtype, device=per_head.device)
    largest = largest.scatter_reduce(0, group, per_head, "amax")
    return torch.where(largest > -torch.inf, largest, 0)


def group_logsumexp(per_head: Float[Tensor, " h"], group: Int[Tensor, " h"], groups: int) -> Float[Tensor, " g"]:
    """Logarithm of the sum of a quantity over the heads of a group, given the logarithms of each head's."""
    shift = group_max(per_head, group, groups)
    return group_sum((per_head - shift[group]).exp(), group, groups).log() + shift
