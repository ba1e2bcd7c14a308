r"""Proposals: from attention statistics or scores to distributions over the entries of a head.

With causal rows ``p_j(i)``, ``j = 1..t``, a row prior ``h_j >= 0`` with sum 1 and ``pbar(i) = sum_j h_j p_j(i)``
(arXiv 2608.28293, section 7 and appendix H)::

    pi_min     proportional to  p_t(i) |v_i|             prior "last"
    pi_min-h   proportional to  pbar(i) |v_i|            prior "harmonic", h_j proportional to 1 / (t - j + 1)
    pi_H2O     proportional to  sum_j p_j(i)             prior "uniform"
    pi_H2O-h   proportional to  sum_j h_j p_j(i)         prior "harmonic"

The minimum-variance proposal of a *self-normalised* estimator centres the values: ``pbar(i) |v_i - o|`` with
``o = sum_i pbar(i) v_i`` (Owen, Monte Carlo theory, methods and examples, section 9.2). Under grouped-query attention
the query heads of a group share one proposal, the mixture ``sum_g alpha_g pi^(g)`` (section 5), whose support covers
every head's.
"""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Prior = Literal["last", "uniform", "harmonic"]
PRIORS: tuple[Prior, ...] = ("last", "uniform", "harmonic")


def row_prior(prior: Prior, valid: Bool[Tensor, "b t"]) -> Float[Tensor, "b t"]:
    """Weights ``h_j`` of the query rows.

    Parameters
    ----------
    prior : "last", "uniform" or "harmonic"
        Newest row only, equal weights, or weights proportional to ``1 / (t - j + 1)``.
    valid : Bool[Tensor, "b t"]
        False for padding. Padding is on the left, so the newest row of every batch row is the last one.

    Returns
    -------
    Float[Tensor, "b t"]
        float64, zero at padding, each row sums to 1.
    """
    t = valid.shape[1]
    age = torch.arange(t, 0, -1, dtype=torch.float64, device=valid.device)
    if prior == "harmonic":
        weight = 1 / age
    elif prior == "uniform":
        weight = torch.ones_like(age)
    elif prior == "last":
        weight = (age == 1).double()
    else:
        raise ValueError(f"prior must be one of {PRIORS}, got {prior!r}")
    weight = weight * valid
    return weight / weight.sum(-1, keepdim=True)


def group_mixture(pi: Float[Tensor, "b hq t"], kv_heads: int) -> Float[Tensor, "b hkv t"]:
    """Uniform mixture of the query heads' distributions within each KV head's group."""
    b, hq, t = pi.shape
    return pi.view(b, kv_heads, hq // kv_heads, t).mean(2)


def normalise(score: Float[Tensor, "*head t"]) -> Float[Tensor, "*head t"]:
    """Divide non-negative scores by their sum; a row of zeros stays a row of zeros."""
    total = score.sum(-1, keepdim=True)
    return score / torch.where(total > 0, total, 1)


def accumulated_attention_proposal(mass: Float[Tensor, "b hq t"], kv_heads: int) -> Float[Tensor, "b hkv t"]:
    """``pi_H2O`` and ``pi_H2O-h``: normalised attention mass, mixed over the group.

    Parameters
    ----------
    mass : Float[Tensor, "b hq t"]
        ``sum_j h_j p_j(i)`` per query head.
    kv_heads : int
        Number of KV heads; divides ``hq``.
    """
    return group_mixture(normalise(mass), kv_heads)


def min_variance_proposal(
    mass: Float[Tensor, "b hq t"], values: Float[Tensor, "b hkv t dv"], *, centered: bool
) -> Float[Tensor, "b hkv t"]:
    """``pi_min`` and ``pi_min-h``: attention mass times the norm of the value, mixed over the group.

    Parameters
    ----------
    mass : Float[Tensor, "b hq t"]
        ``pbar(i) = sum_j h_j p_j(i)`` per query head; sums to 1 over ``t``.
    values : Float[Tensor, "b hkv t dv"]
        Value entries, any floating dtype.
    centered : bool
        Use ``|v_i - o|`` with ``o = sum_i pbar(i) v_i`` of each query head instead of ``|v_i|``.

    Returns
    -------
    Float[Tensor, "b hkv t"]
        Same dtype as ``mass``; sums to 1 over ``t``.
    """
    b, hq, t = mass.shape
    kv_heads = values.shape[1]
    grouped = mass.view(b, kv_heads, hq // kv_heads, t)
    return normalise(grouped * value_distance(grouped, values, centered=centered)).mean(2)


def value_distance(
    mass: Float[Tensor, "b hkv g t"], values: Float[Tensor, "b hkv t dv"], *, centered: bool
) -> Float[Tensor, "b hkv #g t"]:
    """``|v_i|``, or ``|v_i - o|`` with ``o`` the mean of the values under each query head's attention ``mass``.

    Same dtype as ``mass``, which need not be normalised.
    """
    values = values.to(mass.dtype)
    if centered:
        output = normalise(mass) @ values
        return torch.cdist(output, values, compute_mode="donot_use_mm_for_euclid_dist")
    return values.norm(dim=-1).unsqueeze(2)


def take_all_stratum(scores: Float[Tensor, "*head t"]) -> Bool[Tensor, "*head t"]:
    """Entries that a scorer marked as "never evict".

    kvpress' scorers protect entries with a sentinel: the largest other score plus one (SnapKV, TOVA, ExpectedAttention,
    KVzip; StreamingLLM's zeros and ones have the same form) or the largest number of the dtype (AdaKV, CriticalKV).
    Harmless for top-k, fatal for a distribution. The test repeats the scorers' own arithmetic, ``float(max) + 1`` in
    the scores' dtype, and is applied until nothing more is found, because a wrapper may add its sentinel to a scorer's.

    Parameters
    ----------
    scores : Float[Tensor, "*head t"]
        One layer's scores for the whole batch, finite.

    Returns
    -------
    Bool[Tensor, "*head t"]
        True for the take-all stratum. Never all True: when no other score is left, scores carry no sentinel.
    """
    protected = torch.zeros_like(scores, dtype=torch.bool)
    largest = torch.finfo(scores.dtype).max
    while True:
        rest = torch.where(protected, -torch.inf, scores)
        top = rest.max()
        candidates = rest == top
        others = torch.where(candidates, -torch.inf, rest).max()
        if others == -torch.inf:
            return protected
        sentinel = torch.tensor(float(others) + 1, dtype=scores.dtype, device=scores.device)
        if top != sentinel and top != largest:
            return protected
        protected = protected | candidates


def proposal_weights(
    scores: Float[Tensor, "*head t"],
    valid: Bool[Tensor, "*head t"],
    *,
    temperature: float = 1.0,
    uniform_mix: float = 0.0,
    name: str = "scores",
) -> Float[Tensor, "*head t"]:
    """Non-negative weights ``a_i`` of a head's entries from any scorer's scores.

    Non-negative scores become ``a = score^(1 / T)``. Scores with negative values become ``softmax(score / T)`` over the
    valid entries of a head (arXiv 2608.28293, appendix D.1). A head without any weight gets equal weights.
    ``uniform_mix`` = eps blends the head's normalised weights with the uniform distribution, ``a <- sum(a) ((1 - eps) a
    / sum(a) + eps / t)``, so totals are kept and every entry has a positive probability.

    Parameters
    ----------
    scores : Float[Tensor, "*head t"]
        Scores of one layer; NaN and infinity are refused.
    valid : Bool[Tensor, "*head t"]
        Entries that may be drawn: not padding, not in the take-all stratum.
    temperature : float
        Proposal temperature T > 0; large T flattens the proposal.
    uniform_mix : float
        eps in [0, 1].
    name : str
        How errors call the scores.

    Returns
    -------
    Float[Tensor, "*head t"]
        float64, zero where not valid.
    """
    if not torch.isfinite(scores).all():
        kind = "NaN" if torch.isnan(scores).any() else "infinite values"
        raise ValueError(f"{name} must be finite, got {kind}")
    scores = scores.double()
    drawable = torch.where(valid, scores, 0)
    if (drawable < 0).any():
        weights = torch.softmax(torch.where(valid, scores / temperature, -torch.inf), -1)
        weights = torch.where(valid, weights, 0)
    else:
        weights = drawable ** (1 / temperature)
        if not torch.isfinite(weights).all():
            raise ValueError(f"{name} ** (1 / {temperature}) overflows: raise the proposal temperature")
    size = valid.sum(-1, keepdim=True)
    uniform = valid / size.clamp(min=1)
    total = weights.sum(-1, keepdim=True)
    weights = torch.where(total > 0, weights, uniform)
    if uniform_mix:
        total = weights.sum(-1, keepdim=True)
        weights = (1 - uniform_mix) * weights + uniform_mix * total * uniform
    return weights


def check_temperature(name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is a positive number (infinity allowed)."""
    if not (isinstance(value, (int, float)) and value > 0) or math.isnan(value):
        raise ValueError(f"{name} must be a number > 0, got {value!r}")
