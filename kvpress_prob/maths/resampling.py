r"""Sampling a weighted sample again, so that a cache that grows stays bounded.

A head holds entries with weights ``w_i`` (from an earlier draw; 1 for entries that were never drawn) and estimates sums
``S(f) = sum_i w_i f_i``, numerator and denominator of attention among them. A new draw keeps entry ``i`` with
probability ``q_i`` and gives it

    w'_i = w_i u_i,      E[u_i 1(i kept)] = 1      (u_i = 1 / q_i, or c_i / (m pi_i)),

old weight times new weight: sequential importance resampling (Gordon, Salmond and Smith, 1993; Doucet, de Freitas and
Gordon, Sequential Monte Carlo methods in practice, 2001). Given the entries held, ``E[S'(f)] = S(f)``; by induction
over the rounds, for every ``f`` that does not depend on the draws,

    E[S(f) after any number of rounds] = sum over all entries ever appended.

The variance of a round is least when ``q_i`` is proportional to an entry's whole contribution, weight included: for
recent queries ``j`` with ``p_j(i) = w_i exp(a_ji) / sum_k w_k exp(a_jk)``, ``q_i`` proportional to
``mean_j p_j(i) |v_i - o|``, the minimum-variance proposal (``proposals.min_variance_proposal``) of the weighted
attention.
"""

import math
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from kvpress_prob.maths.draw import DrawSettings, Proposal, draw


def resample(
    log_w: Float32[Tensor, "h t"],
    weights: Float[Tensor, "h t"],
    take_all: Bool[Tensor, "h t"],
    *,
    keep: float,
    settings: DrawSettings,
    stream: Int64[Tensor, " h"],
) -> tuple[Bool[Tensor, "h t"], Float32[Tensor, "h t"]]:
    """One round for all heads of a layer.

    Parameters
    ----------
    log_w : Float32[Tensor, "h t"]
        Log-weights of the entries held; whatever at places without an entry.
    weights : Float[Tensor, "h t"]
        Proposal weights, float64; zero in the take-all stratum and at places without an entry.
    take_all : Bool[Tensor, "h t"]
        Entries that are kept with their weight. They count towards the budget.
    keep : float
        Mean number of entries to keep per head; the heads share them. A smaller support is kept whole.
    settings, stream
        As in ``draw``; but a largest weight is one of a first draw, not of a round.

    Returns
    -------
    kept : Bool[Tensor, "h t"]
    log_w : Float32[Tensor, "h t"]
        Old plus new log-weight of the kept entries.
    """
    group = torch.zeros(len(weights), dtype=torch.int64, device=weights.device)
    result = draw(
        [Proposal(weights)],
        take_all,
        group,
        keep_fraction=keep / weights.shape[1],
        settings=replace(settings, max_weight=math.inf),
        stream=stream,
        groups=1,
    )
    return result.kept, torch.where(result.kept, log_w + result.log_w, 0)
