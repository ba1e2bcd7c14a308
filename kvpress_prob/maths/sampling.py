r"""Draws: exact multinomial counts and systematic samples, for all heads of a model at once.

*Multinomial counts.* ``m`` reaches 1e9 and more, so drawing ``m`` categorical samples is out. Counts over a binary tree
of entries are exact: the left half of a node with count ``c`` receives ``Binomial(c, P(left) / P(node))`` of them
(recursive binomial splitting; Devroye, Non-Uniform Random Variate Generation, section XI.1). ``t - 1`` binomials a
head, all nodes of a level in one call.

*Systematic sampling.* With inclusion probabilities ``q_i <= 1``, running sums ``C_i = q_1 + ... + q_i`` and one offset
``u`` in [0, 1), entry ``i`` is kept when ``C_i + u`` crosses an integer. Then ``P(i kept) = q_i``, the sample size is
``sum q`` rounded down or up, and the position order spreads the sample over the text (Madow, 1949; Saerndal, Swensson
and Wretman, Model Assisted Survey Sampling, section 3.6). Entries with ``q_i = 1`` are the take-all stratum and are
always kept.
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int, Int64
from torch import Tensor

from kvpress_prob.maths.binomial import binomial
from kvpress_prob.maths.random import fork, uniforms_of

Binomial = Callable[[int, Tensor, Tensor], Tensor]
"""Maps (level, counts, probabilities), the tensors [h nodes] and float64, to binomial variates of the same shape."""


def multinomial_counts(
    pi: Float[Tensor, "h t"], draws: Int[Tensor, " h"], stream: Int64[Tensor, " h"]
) -> Int[Tensor, "h t"]:
    """Counts ``c ~ Multinomial(m, pi)`` of each head.

    Parameters
    ----------
    pi : Float[Tensor, "h t"]
        Proposals; a row sums to 1, or to 0 (then its counts are 0). Computed in float64.
    draws : Int[Tensor, "h"]
        ``m`` of each head, up to 1e15.
    stream : Int64[Tensor, "h"]
        One stream of random numbers a head (``random.streams``).

    Returns
    -------
    Int[Tensor, "h t"]
        Zero where ``pi`` is zero.
    """

    node = torch.arange(pi.shape[1], device=pi.device)

    def draw(level: int, counts: Tensor, probability: Tensor) -> Tensor:
        return binomial(counts, probability, fork(stream.unsqueeze(-1), level, node[: counts.shape[1]]))

    return split_counts(pi.double(), draws, draw)


def split_counts(pi: Float[Tensor, "h t"], draws: Int[Tensor, " h"], binomial: Binomial) -> Int[Tensor, "h t"]:
    """The deterministic core of ``multinomial_counts``: push the draws down a binary tree.

    Parameters
    ----------
    pi : Float[Tensor, "h t"]
        Proposals, float64.
    draws : Int[Tensor, "h"]
        Total count of each head.
    binomial : callable
        ``binomial(level, count, probability)`` gives how many of ``count`` go to the left child; the root is level 0.
    """
    t = pi.shape[1]
    depth = max(t - 1, 0).bit_length()
    levels = [torch.nn.functional.pad(pi, (0, 2**depth - t))]
    for _ in range(depth):
        levels.append(levels[-1].unflatten(-1, (-1, 2)).sum(-1))
    counts = torch.where(levels[-1].squeeze(-1) > 0, draws, 0).double().unsqueeze(-1)
    for number, level in enumerate(reversed(levels[:-1])):
        left, right = level.unflatten(-1, (-1, 2)).unbind(-1)
        both = left + right
        # A node without weight has count 0. Comparing with zero keeps an empty child empty whatever the rounding of
        # left / both.
        probability = torch.where(both > 0, left / torch.where(both > 0, both, 1), 0).clamp(0, 1)
        to_left = torch.where(right > 0, binomial(number, counts, probability), counts)
        to_left = torch.where(left > 0, to_left, 0)
        counts = torch.stack((to_left, counts - to_left), -1).flatten(-2)
    return counts[:, :t].long()


def systematic_sample(q: Float[Tensor, "h t"], offset: Float[Tensor, " h"]) -> Bool[Tensor, "h t"]:
    """Systematic sample of each head with inclusion probabilities ``q``.

    Parameters
    ----------
    q : Float[Tensor, "h t"]
        Inclusion probabilities in [0, 1], float64.
    offset : Float[Tensor, "h"]
        Explicit uniforms in [0, 1), one per head.

    Returns
    -------
    Bool[Tensor, "h t"]
        True for kept entries: all of ``q = 1``, none of ``q = 0``.
    """
    take_all = q >= 1
    running = torch.where(take_all, 0, q).cumsum(-1) + offset.unsqueeze(-1)
    crossed = running.floor()
    before = torch.cat((offset.floor().unsqueeze(-1), crossed[:, :-1]), -1)
    return take_all | (crossed > before)


def offsets(stream: Int64[Tensor, " h"]) -> Float[Tensor, " h"]:
    """One uniform per head, float64."""
    return uniforms_of(fork(stream, 0))
