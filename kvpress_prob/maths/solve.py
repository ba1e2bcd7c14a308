r"""One unknown a group, found without asking the device: the budget's equations.

Every expectation of the budget increases in its one unknown, so a fixed number of halvings finds it (``bisect``).

*A sum that saturates.* Part ``k`` of a draw keeps entry ``i`` with ``min(1, c q_ki)``, and several parts keep it with
``1 - prod_k (1 - min(1, c q_ki))``. Once ``c max_k q_ki >= 1`` that is 1; below it is a polynomial in ``c``, whose
coefficients are the elementary symmetric polynomials ``e_j`` of the parts' ``q_ki``::

    sum_i 1 - prod_k (1 - c q_ki) = sum_j (-1)^(j + 1) c^j sum_i e_j(q_1i, ..., q_Ki)

So with a head's entries in the order of ``max_k q_ki`` and the sums ``sum_i e_j`` over the entries from each place on,
a head's total at any ``c`` is a binary search and ``K`` products, and a bisection passes over the entries once, not
once a halving. Everything is kept as logarithms, so sharp proposals neither underflow nor overflow.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvpress_prob.maths.groups import group_sum

HALVINGS = 56
"""Of an interval of logarithms: one of ten thousand ends below 1e-12."""


def bisect(
    total: Callable[[Tensor], Tensor], target: Float[Tensor, " g"], low: Tensor, high: Tensor, halvings: int
) -> tuple[Tensor, Tensor]:
    """Halve ``[low, high]`` of every group, ``total(low) < target <= total(high)`` where that holds at first.

    Parameters
    ----------
    total : callable
        Increasing in every group's unknown.
    target : Float[Tensor, "g"]
    low, high : Tensor
        [g]; whole numbers stay whole numbers and end as neighbours.
    halvings : int
        Always so many, whatever the values are.
    """
    for _ in range(halvings):
        middle = (low + high) // 2 if low.dtype == torch.int64 else (low + high) / 2
        below = total(middle) < target
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return low, high


def solve_scale(
    parts: Sequence[Float[Tensor, "h t"]],
    group: Int[Tensor, " h"],
    target: Float[Tensor, " g"],
    at_least: Float[Tensor, " h"],
    low: Float[Tensor, " g"],
) -> tuple[Float[Tensor, " g"], Bool[Tensor, " g"]]:
    """``log c`` of each group with ``sum_h max(at_least_h, sum_i 1 - prod_k (1 - min(1, c q_ki))) = target``.

    Parameters
    ----------
    parts : sequence of Float[Tensor, "h t"]
        ``log q_k``, float64: sums of many of them are compared with targets to 1e-9.
    group : Int[Tensor, "h"]
    target : Float[Tensor, "g"]
    at_least : Float[Tensor, "h"]
        Smallest total of a head that has any entry.
    low : Float[Tensor, "g"]
        Where to search from; up to where every entry saturates.

    Returns
    -------
    log_c : Float[Tensor, "g"]
    reachable : Bool[Tensor, "g"]
        Whether the target is above the total at ``low``.
    """
    groups, heads = len(target), len(group)
    largest = parts[0] if len(parts) == 1 else torch.stack(list(parts)).amax(0)
    ascending, order = (-largest).sort(-1)
    # log sum_i e_j over the entries from each place of the order on, and nothing behind the last.
    rest = []
    for log_e in _symmetric(parts):
        from_end = torch.logcumsumexp(log_e.gather(-1, order).flip(-1), -1).flip(-1)
        rest.append(torch.cat((from_end, from_end.new_full((heads, 1), -torch.inf)), -1))

    def total(log_c: Tensor) -> Tensor:
        scale = log_c[group].unsqueeze(-1)
        saturated = torch.searchsorted(ascending, scale, right=True)
        of_head = saturated.double()
        for power, sums in enumerate(rest, 1):
            term = (power * scale + sums.gather(-1, saturated)).exp()
            of_head = of_head + term if power % 2 else of_head - term
        of_head = of_head.squeeze(-1)
        return group_sum(torch.where(has_entries, of_head.maximum(at_least), 0), group, groups)

    has_entries = ascending[:, 0] < torch.inf
    lowest = torch.full_like(low, torch.inf)
    smallest = torch.where(largest > -torch.inf, largest, torch.inf).amin(-1)
    lowest = lowest.scatter_reduce(0, group, smallest, "amin")
    high = torch.where(lowest.isfinite(), -lowest, 0).maximum(low) + 1e-9
    reachable = total(low) < target
    return bisect(total, target, low, high, HALVINGS)[1], reachable


def _symmetric(parts: Sequence[Tensor]) -> list[Tensor]:
    """Logarithms of the elementary symmetric polynomials of every entry's parts, from the first on."""
    log_e = [parts[0]]
    for part in parts[1:]:
        products = [part, *(it + part for it in log_e)]
        log_e = [torch.logaddexp(old, new) for old, new in zip(log_e, products, strict=False)] + products[-1:]
    return log_e
