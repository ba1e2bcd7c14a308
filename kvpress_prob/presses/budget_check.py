"""Why a draw kept another number of entries than it was asked for: one sentence, or nothing."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvpress_prob.maths.budget import MAX_DRAWS
from kvpress_prob.maths.draw import Draw, Proposal


def budget_figures(proposals: Sequence[Proposal], take_all: Tensor, result: Draw) -> Tensor:
    """Kept, protected and possible entries, and draws (0 without), of every head: int64 [4 h]. Nothing is asked of the
    device."""
    possible = take_all.clone()
    for proposal in proposals:
        if proposal.share:
            possible |= proposal.weights > (-torch.inf if proposal.logarithms else 0)
    draws = torch.zeros(len(take_all), dtype=torch.int64, device=take_all.device)
    return torch.stack(
        [
            result.kept.sum(-1),
            take_all.sum(-1),
            possible.sum(-1),
            draws if result.draws is None else result.draws.to(draws.device),
        ]
    )


def budget_warning(figures: Tensor, group: Tensor, entries: int, compression_ratio: float) -> str | None:
    """What kept a budget from being met by more than an entry a head.

    Parameters
    ----------
    figures : Int[Tensor, "4 h"]
        ``budget_figures`` of one batch row, on the CPU.
    group : Int[Tensor, "h"]
        Budget group of each head, on the CPU.
    entries : int
        Entries of each head.
    compression_ratio : float
        What was asked for.
    """
    of_group = group.numpy()
    kept, protected, possible = (np.bincount(of_group, weights=it) for it in figures[:3].numpy())
    heads = np.bincount(of_group)
    wanted = (1 - compression_ratio) * entries * heads
    achieved = 1 - float(kept.sum()) / (entries * len(group))
    result = f"the compression ratio is {achieved:.3f} instead of {compression_ratio:.3f}"
    if (over := protected > np.maximum(wanted, heads) + 0.5).any():
        return (
            f"protected entries alone exceed the budget, {int(protected[over].sum())} against "
            f"{float(wanted[over].sum()):.0f}: {result}. Protect fewer (the scorer's window or sinks, n_sink, n_recent)"
        )
    if (under := possible < wanted - heads).any():
        return (
            f"fewer entries than the budget have a score above 0, {int(possible[under].sum())} against "
            f"{float(wanted[under].sum()):.0f}: {result}. uniform_mix > 0 gives every entry a probability"
        )
    if (figures[3].numpy() >= MAX_DRAWS // 2).any() and (kept < wanted - heads).any():
        return (
            f"{MAX_DRAWS:.0e} draws from so sharp a proposal find fewer entries than the budget: {result}. "
            "Raise the proposal temperature, or use sampler='systematic'"
        )
    return None
