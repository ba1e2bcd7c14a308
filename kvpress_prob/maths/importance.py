r"""Importance weights: what decode-time attention adds to the logits of a kept entry.

Self-normalised importance sampling over the kept prefill entries, exact over everything appended later, one common
denominator (arXiv 2608.28293, section 5, Algorithm 1)::

    o_hat = sum_i w_i exp(s q.k_i) v_i / sum_i w_i exp(s q.k_i)

    counts      w_i = c_i / (m pi_i)             the paper
    inclusion   w_i = 1 / P(i kept)              Horvitz and Thompson, 1952: the same kept set without the noise of the
    counts
    none        w_i = 1                          plain eviction

``E[w_i 1(i kept)] = 1`` for the first two, so any sum over entries is estimated without bias. The importance
temperature ``tau`` (section 6) divides the logarithm: 1 is the full correction, infinity none. A largest weight keeps a
single unlikely entry from speaking for a whole text.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

Correction = Literal["counts", "inclusion", "none"]
CORRECTIONS: tuple[Correction, ...] = ("counts", "inclusion", "none")


def log_weights_from_counts(
    counts: Int[Tensor, "h t"], pi: Float[Tensor, "h t"], draws: Int[Tensor, " h"]
) -> Float[Tensor, "h t"]:
    """``log c_i - log(m pi_i)``; 0 where ``c_i = 0``. float64."""
    kept = counts > 0
    expected = draws.double().unsqueeze(-1) * pi.double()
    return torch.where(kept, torch.where(kept, counts, 1).double().log() - torch.where(kept, expected, 1).log(), 0)


def log_weights_from_inclusion(kept: Bool[Tensor, "h t"], probability: Float[Tensor, "h t"]) -> Float[Tensor, "h t"]:
    """``-log P(i kept)``; 0 where the entry is not kept. float64."""
    return -torch.where(kept, probability.double(), 1).log()


LARGEST = 1e30
"""A log-weight that is as good as infinite."""


def temper(log_w: Float[Tensor, "*head t"], temperature: float) -> Float[Tensor, "*head t"]:
    """``log_w / tau``, no further than float32 logits can be added to."""
    return torch.where(log_w.isfinite(), (log_w / temperature).clamp(-LARGEST, LARGEST), log_w)


def truncate(log_w: Float[Tensor, "*head t"], max_weight: float) -> Float[Tensor, "*head t"]:
    """``min(w, max_weight)``: a little bias for much less variance (Ionides, Truncated importance sampling, 2008)."""
    return log_w.clamp(max=math.log(max_weight))


def effective_sample_size(log_w: Float[Tensor, "h t"], kept: Bool[Tensor, "h t"]) -> Float[Tensor, " h"]:
    """Kish's effective sample size ``(sum w)^2 / sum w^2`` over the kept entries of each head; 0 for an empty head."""
    log_w = torch.where(kept, log_w.double(), -torch.inf)
    log_ess = 2 * torch.logsumexp(log_w, -1) - torch.logsumexp(2 * log_w, -1)
    return torch.where(kept.any(-1), log_ess.exp(), 0)
