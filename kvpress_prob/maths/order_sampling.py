r"""Priority samples of a stream: of bounded size at all times, and of the law of one draw over the whole stream.

Every entry ``i`` has a permanent random number ``u_i`` in [0, 1), drawn once and for all, and an amount ``a_i > 0``.
Its priority is ``a_i / u_i``; of ``n`` entries the ``C`` of largest priority are kept. With ``tau`` the largest
priority that was ever evicted,

    kept iff a_i / u_i > tau,        q_i = min(1, a_i / tau),        w_i = 1 / q_i,

and ``E[w_i 1(i kept)] = 1``: given all other entries, ``i`` is kept iff ``u_i < a_i / tau``, and then ``tau`` does not
depend on ``u_i`` (priority sampling; Duffield, Lund and Thorup, Priority sampling for estimation of arbitrary subset
sums, 2007; order sampling: Rosen, 1997). ``tau`` never falls, so samples are nested: what was evicted is never wanted
back. The ``C`` largest of a stream are the ``C`` largest of those kept before and those new, so *how* the stream is cut
into pieces changes neither sample nor weights, to the bit: nothing is summed, numbers are only compared.

*Several amounts that share a budget* (``k = 1..K``, a random number each): the priority is ``max_k a_ki / u_ki``, kept
iff ``u_ki < q_ki = min(1, a_ki / tau)`` for any ``k``, with probability ``1 - prod_k (1 - q_ki)``. The size is still
exactly ``C``; how much of it each of them gets is set by the scale of its amounts (``share_scales``).

*Amounts that change* from round to round (what the newest queries attend to): an entry must pass every round, so ``q_i
= min over rounds r of a_i(r) / tau(r)``, and its priority in a round is that of the ``k`` in which it passed so far.
Given what is kept, ``u_i / q_i`` is uniform again, so ``E[w_i(r) 1(kept) | round r - 1] = w_i(r - 1)``: sequential
importance resampling (``maths.resampling``) with permanent random numbers.

Without random numbers (``u = 1``) and weights this is a running top-k.

Everything is a logarithm in float64, over a flat list of the entries of all heads.
"""

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor


def log_priorities(
    log_amounts: Float64[Tensor, "k n"], log_u: Float64[Tensor, "k n"], passed: Bool[Tensor, "k n"] | None = None
) -> Float64[Tensor, " n"]:
    """``max_k log(a_ki / u_ki)`` over the ``k`` in which an entry passed so far; None: all."""
    priority = log_amounts - log_u
    return (priority if passed is None else torch.where(passed, priority, -torch.inf)).amax(0)


def largest(
    log_priority: Float64[Tensor, " n"], group: Int64[Tensor, " n"], capacity: Int64[Tensor, " g"]
) -> tuple[Bool[Tensor, " n"], Float64[Tensor, " g"]]:
    """The entries of largest priority of every group, and the largest priority that does not fit.

    Parameters
    ----------
    log_priority : Float64[Tensor, "n"]
        Of equal ones the earlier entry goes first.
    group : Int64[Tensor, "n"]
        Budget group of each entry, 0 to g - 1.
    capacity : Int64[Tensor, "g"]
        Entries that each group may keep, at least 0.

    Returns
    -------
    kept : Bool[Tensor, "n"]
    log_tau : Float64[Tensor, "g"]
        -inf for a group that fits as a whole.
    """
    by_priority = log_priority.argsort(descending=True, stable=True)
    order = by_priority[group[by_priority].argsort(stable=True)]  # groups in turn, each by falling priority
    size = torch.bincount(group, minlength=len(capacity))
    first = size.cumsum(0) - size
    kept = torch.zeros_like(group, dtype=torch.bool)
    kept[order] = torch.arange(len(group), device=group.device) - first[group[order]] < capacity[group[order]]
    evicted = torch.where(kept, -torch.inf, log_priority)
    log_tau = log_priority.new_full((len(capacity),), -torch.inf)
    return kept, log_tau.scatter_reduce(0, group, evicted, "amax")


def log_inclusion(log_q: Float64[Tensor, "k n"]) -> Float64[Tensor, " n"]:
    """``log(1 - prod_k (1 - q_k))`` of ``log q_k``, which may exceed 0 for entries that are kept for certain."""
    log_q = log_q.clamp(max=0)
    if len(log_q) == 1:
        return log_q[0]
    union = (-torch.expm1(torch.log1p(-log_q.exp()).sum(0))).log()
    # A union of tiny probabilities underflows; it is no less than the largest of them.
    return torch.maximum(union, log_q.amax(0))


def share_scales(
    log_amount: Float64[Tensor, " n"],
    log_w: Float64[Tensor, " n"],
    group: Int64[Tensor, " n"],
    size: Float64[Tensor, " g"],
) -> Float64[Tensor, " g"]:
    """``log lambda`` of each group so that a draw with ``q_i = min(1, lambda a_i)`` keeps ``size`` entries on average.

    Solved exactly: amounts in falling order, the first ``m`` of them kept for certain, ``lambda = (size - m) / (sum of
    the rest)`` for the ``m`` at which the next one is not.

    Parameters
    ----------
    log_amount : Float64[Tensor, "n"]
    log_w : Float64[Tensor, "n"]
        Each entry stands for ``w`` entries of its amount: log-weights of a sample, 0 for a whole population.
    group : Int64[Tensor, "n"]
        Budget group of each entry, 0 to g - 1.
    size : Float64[Tensor, "g"]
        Wanted sizes, at least 0; -inf is returned for 0, and the ``lambda`` that keeps everything for a size that is
        not reached.
    """
    scales = []
    for index, wanted in enumerate(size.tolist()):
        mine = (group == index).nonzero().squeeze(-1)
        if wanted <= 0 or not len(mine):
            scales.append(log_amount.new_tensor(-torch.inf))
            continue
        order = mine[log_amount[mine].argsort(descending=True, stable=True)]
        falling, weight = log_amount[order], log_w[order].exp()
        # Sums from the small end, so that nothing cancels.
        rest = torch.logcumsumexp((falling + log_w[order]).flip(0), 0).flip(0)  # of the entries from m on
        certain = weight.cumsum(0) - weight  # weight of the entries before m
        scale = torch.where(certain < wanted, (wanted - certain).clamp(min=1e-300).log() - rest, torch.inf)
        fits = (scale + falling <= 0) & (certain < wanted)
        scales.append(scale[int(fits.int().argmax())] if fits.any() else -falling[-1])
    return torch.stack(scales)


def log_totals(log_amount: Float64[Tensor, " n"], head: Int64[Tensor, " n"], heads: int) -> Float64[Tensor, " h"]:
    """Logarithm of the sum over each head's entries, 0 for a head without any."""
    top = log_amount.new_full((heads,), -torch.inf).scatter_reduce(0, head, log_amount, "amax")
    top = torch.where(top > -torch.inf, top, 0)
    total = torch.zeros_like(top).index_add(0, head, (log_amount - top[head]).exp())
    return torch.where(total > 0, top + total.log(), 0)
