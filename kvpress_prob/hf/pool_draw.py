"""What of a bounded cache's pool stays: one draw over all layers and heads of a batch row.

The pool's state goes in as plain tensors and comes out brought up to date; ``maths.order_sampling`` has the law.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from kvpress_prob.hf.pool import RATIO_FROM, PoolSettings
from kvpress_prob.maths import importance
from kvpress_prob.maths.order_sampling import largest, log_inclusion, log_priorities, log_totals, share_scales


@dataclass
class PoolState:
    """What ``drawn`` needs of one batch row: its candidates of all layers and its numbers a head, ``H`` of them.

    Attributes
    ----------
    position, head : Int64[Tensor, "n"]
    scores : Float64[Tensor, "k n"]
        As in the store's column.
    amounts : Float64[Tensor, "k n"]
        This round's log amounts; those of scores that never change are ``scores`` again.
    log_scale, log_tau : Float64[Tensor, "k H"]
    group : Int64[Tensor, "H"]
    """

    position: Tensor
    head: Tensor
    scores: Tensor
    amounts: Tensor
    log_u: Tensor
    log_scale: Tensor
    log_tau: Tensor
    group: Tensor

    @property
    def heads_of(self) -> Tensor:
        """Heads of each group."""
        return torch.bincount(self.group)


def drawn(state: PoolState, settings: PoolSettings, shares: Sequence[float], before: int, boundary: int) -> Tensor:
    """Which candidates stay [n]; ``scores``, ``log_scale`` and ``log_tau`` of the state are brought up to date.

    ``before`` and ``boundary`` are the tokens that had joined the pool before and have joined it now.
    """
    if any(settings.changing):
        return _resampled(state, settings, shares, boundary)
    return _nested(state, settings, shares, before, boundary)


def log_weights(state: PoolState, settings: PoolSettings) -> Tensor:
    """Log-weights [n] of the candidates if they stay."""
    if settings.draw.correction == "none":
        return torch.zeros_like(state.log_u[0])
    log_w = -log_inclusion(_log_q(state, settings))
    return importance.truncate(importance.temper(log_w, settings.draw.temperature), settings.draw.max_weight)


def _log_q(state: PoolState, settings: PoolSettings) -> Tensor:
    """``log q_k`` [k n] of each component alone."""
    tau, scale = state.log_tau[:, state.head], state.log_scale[:, state.head].nan_to_num(0)
    never = (state.scores + scale - tau).clamp(max=0)
    changing = torch.tensor(settings.changing, device=never.device).unsqueeze(-1)
    return torch.where(changing, state.scores, never)


def _nested(state: PoolState, settings: PoolSettings, shares: Sequence[float], before: int, boundary: int) -> Tensor:
    """Scores that never change: the same sample however the tokens came in."""
    if not _fix_scales(state, settings, shares, boundary):
        return torch.ones_like(state.head, dtype=torch.bool)
    priority = log_priorities(state.amounts + state.log_scale[:, state.head], state.log_u)
    group, heads_of = state.group[state.head], state.heads_of
    tau = torch.full_like(heads_of, -torch.inf, dtype=torch.float64).index_copy(0, state.group, state.log_tau[0])
    # A budget that grows with the text is a bound at every boundary; a fixed one need only be met at the last.
    steps = [boundary]
    if settings.budget.max_entries is None:
        steps = list(range(before + settings.budget.interval, boundary + 1, settings.budget.interval))
    kept = torch.ones_like(state.head, dtype=torch.bool)
    for step in steps:
        capacity = settings.capacity(step)
        if capacity is None:
            continue
        here = (kept & (state.position < step)).nonzero().squeeze(-1)
        passes = priority[here] > tau[group[here]]
        stays, cut = largest(torch.where(passes, priority[here], -torch.inf), group[here], capacity * heads_of)
        kept[here] = stays & passes
        tau = torch.maximum(tau, cut)
    state.log_tau = tau[state.group].expand_as(state.log_tau).clone()
    return kept


def _fix_scales(state: PoolState, settings: PoolSettings, shares: Sequence[float], boundary: int) -> bool:
    """Fix every component's scale when the budget is exceeded for the first time; False before that.

    The scales come from the tokens up to the first boundary at which some do not fit, all of which are still there. So
    they do not depend on the passes either.
    """
    if not state.log_scale.isnan().any():
        return True
    group, heads_of = state.group[state.head], state.heads_of
    first = None
    if settings.budget.max_entries is None:
        first = RATIO_FROM if boundary >= RATIO_FROM else None
    else:
        capacity = cast(int, settings.capacity(boundary)) * heads_of
        for index, limit in enumerate(capacity.tolist()):
            mine = state.position[group == index]
            if len(mine) > limit:
                last = int(mine.kthvalue(limit + 1).values)
                end = (last // settings.budget.interval + 1) * settings.budget.interval
                first = end if first is None else min(first, end)
    if first is None:
        return False
    here = state.position < first
    size = heads_of * float(cast(int, settings.capacity(first)))
    state.log_scale = _scales(state, settings, shares, size, here, torch.zeros_like(state.log_u[0]))
    return True


def _scales(
    state: PoolState, settings: PoolSettings, shares: Sequence[float], size: Tensor, here: Tensor, log_w: Tensor
) -> Tensor:
    """``log_scale`` [k H] so that component ``k`` alone would keep its share of ``size`` [g]."""
    scales = []
    group = state.group[state.head]
    for amounts, uniform, share in zip(state.amounts, settings.uniform, shares, strict=True):
        scale = torch.zeros(len(state.group), dtype=torch.float64, device=amounts.device)
        some = here & (amounts < torch.inf)  # protected entries are kept whatever the scale
        if uniform:
            scale = -log_totals(amounts[some] + log_w[some], state.head[some], len(scale))
        if len(shares) > 1:
            scaled = amounts[some] + scale[state.head[some]]
            scale = scale + share_scales(scaled, log_w[some], group[some], share * size)[state.group]
        scales.append(scale)
    return torch.stack(scales)


def _resampled(state: PoolState, settings: PoolSettings, shares: Sequence[float], boundary: int) -> Tensor:
    """Some scores change: one round over what is left of the sample."""
    group, heads_of = state.group[state.head], state.heads_of
    capacity = settings.capacity(boundary)
    size = torch.bincount(group, minlength=len(heads_of))
    if capacity is None or not bool((size > capacity * heads_of).any()):
        return torch.ones_like(state.head, dtype=torch.bool)
    changing = torch.tensor(settings.changing, device=group.device).unsqueeze(-1)
    before = state.log_tau[:, state.head]
    log_q = _log_q(state, settings)
    everything = torch.ones_like(state.head, dtype=torch.bool)
    scale = _scales(state, settings, shares, capacity * heads_of.double(), everything, -log_inclusion(log_q))
    scaled = state.amounts + scale[:, state.head]
    passed = None
    if not settings.top_k:
        passed = torch.where(changing, state.log_u < state.scores, state.scores - state.log_u > before)
    kept, tau = largest(log_priorities(scaled, state.log_u, passed), group, capacity * heads_of)
    if bool((tau == torch.inf).any()):
        protected = int((scaled == torch.inf).any(0).sum())
        raise ValueError(
            f"protected entries alone exceed the budget, {protected} against {int(capacity * heads_of.sum())}: protect "
            "fewer (the scorer's marks, window or sinks) or raise max_entries"
        )
    exceeded = tau > -torch.inf
    cut = torch.where(exceeded, tau, 0)[group]
    now = torch.where(changing & exceeded[group], torch.minimum(state.scores, scaled - cut), state.scores)
    state.scores = now
    # Thresholds of scores that never change are kept in their own units: scales are new in every round.
    raw = torch.where(exceeded[state.group], tau[state.group] - scale, -torch.inf)
    state.log_tau = torch.maximum(state.log_tau, raw)
    state.log_scale = torch.zeros_like(scale)
    return kept
