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
from jaxtyping import Bool, Float, Float64, Num
from torch import Tensor

Prior = Literal["last", "uniform", "harmonic"]
PRIORS: tuple[Prior, ...] = ("last", "uniform", "harmonic")
ScoresAre = Literal["weights", "log_weights", "logits"]
SCORES_ARE: tuple[ScoresAre, ...] = ("weights", "log_weights", "logits")

_LAST = -1e8
"""Log-weight of the entries of a head whose scores give it none: below whatever scores and temperatures give."""


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


def take_all_stratum(scores: Num[Tensor, "*head t"]) -> Bool[Tensor, "*head t"]:
    """Entries that scores of an unknown scorer mark as "never evict".

    kvpress' scorers protect entries with the largest number of the dtype (AdaKV, CriticalKV) or with the largest other
    score of the layer plus one, at the same places in every head (SnapKV, TOVA, ExpectedAttention). Harmless for top-k,
    fatal for a distribution. What a known scorer protects is known and not asked here; of others only one plateau on
    top is believed, and only where ordinary scores cannot look like it:

    * the largest number of the dtype, wherever it stands;
    * else, of floating scores, ``float(largest other) + 1`` at the same places in every head, over others that differ
      and whose range is below 1. Ranks, counts and other integers, constants and one-hot scores are not.

    Parameters
    ----------
    scores : Num[Tensor, "*head t"]
        The scores of one layer of one batch row: [hkv, t], or [t].

    Returns
    -------
    Bool[Tensor, "*head t"]
        True for the take-all stratum.
    """
    if not scores.dtype.is_floating_point:
        if scores.dtype == torch.bool:
            return torch.zeros_like(scores)
        return scores == torch.iinfo(scores.dtype).max
    largest = scores == torch.finfo(scores.dtype).max
    plateau = scores == scores.max()
    top = torch.where(plateau, -torch.inf, scores).max()
    bottom = torch.where(plateau, torch.inf, scores).min()
    mark = (top.double() + 1).to(scores.dtype)
    everywhere = (plateau == plateau.reshape(-1, plateau.shape[-1])[0]).all()
    marked = (scores.max() == mark) & (bottom < top) & (top.double() - bottom.double() < 1) & everywhere
    return torch.where(largest.any(), largest, plateau & marked)


def log_proposal(
    scores: Num[Tensor, "*head t"],
    drawable: Bool[Tensor, "*head t"],
    scores_are: ScoresAre | None,
    *,
    temperature: float = 1.0,
    uniform_mix: float = 0.0,
) -> Float64[Tensor, "*head t"]:
    """Logarithms of the weights ``a_i`` of a head's entries from any scorer's scores.

    What becomes of a score depends on what the scorer says that it is, and on nothing else of other heads, layers or
    batch rows::

        weights      a_i = s_i^(1/T)                amounts >= 0, comparable between heads and layers
        log_weights  a_i = exp(s_i / T)             logarithms of such amounts
        logits       a_i = softmax(s / T)_i         any numbers; they compare the entries of one head
        None         a head whose own scores go below 0 as logits, any other as weights

    all in log space (arXiv 2608.28293, appendix D.1, has the first and the third), so small T approaches top-k.
    Negative weights of a head that are nothing but rounding (``is_negative``) are 0. A head without any weight is drawn
    from uniformly, after all others where heads compete. ``uniform_mix`` = eps blends the head's normalised weights
    with the uniform distribution, ``a <- sum(a) ((1 - eps) a / sum(a) + eps / t)``, so totals are kept and every entry
    has a positive probability.

    Parameters
    ----------
    scores : Num[Tensor, "*head t"]
        Scores of one layer, finite, of any real dtype.
    drawable : Bool[Tensor, "*head t"]
        Entries that may be drawn: not padding, not in the take-all stratum.
    scores_are : "weights", "log_weights", "logits" or None
    temperature : float
        Proposal temperature T > 0; large T flattens the proposal.
    uniform_mix : float
        eps in [0, 1].

    Returns
    -------
    Float64[Tensor, "*head t"]
        ``-inf`` where nothing is drawn.
    """
    scores = scores.double()
    log_s = scores.clamp(min=0).log()
    linear = torch.where(drawable & (log_s > -torch.inf), log_s / temperature, -torch.inf)
    exponent = scores
    if scores_are != "log_weights" and scores.shape[-1]:  # logits count from the largest, so that nothing overflows
        top = torch.where(drawable, scores, -torch.inf).amax(-1, keepdim=True)
        exponent = scores - top.clamp(min=torch.finfo(torch.float64).min)
    exponent = torch.where(drawable, exponent / temperature, -torch.inf)
    if scores_are == "weights":
        log_a = linear
    elif scores_are == "log_weights":
        log_a = exponent
    elif scores_are == "logits":
        log_a = log_normalise(exponent)
    else:
        log_a = torch.where(is_negative(scores, drawable).unsqueeze(-1), log_normalise(exponent), linear)
    size = drawable.sum(-1, keepdim=True)
    weightless = (log_a == -torch.inf).all(-1, keepdim=True)
    log_a = torch.where(weightless & drawable, _LAST, log_a)
    if uniform_mix:
        uniform = torch.where(
            drawable, torch.logsumexp(log_a, -1, keepdim=True) - size.clamp(min=1).double().log(), -torch.inf
        )
        if uniform_mix == 1:
            return uniform
        log_a = torch.logaddexp(log_a + math.log1p(-uniform_mix), uniform + math.log(uniform_mix))
    return log_a


def is_negative(scores: Num[Tensor, "*head t"], drawable: Bool[Tensor, "*head t"]) -> Bool[Tensor, "*head"]:
    """Whether a head has negative scores of more than a thousandth of its largest magnitude: not those of rounding."""
    scores = torch.where(drawable, scores.double(), 0)
    return scores.amin(-1) < -1e-3 * scores.abs().amax(-1)


def log_normalise(log_a: Float[Tensor, "*head t"]) -> Float[Tensor, "*head t"]:
    """Logarithms of weights over their sum; a row of ``-inf`` stays one."""
    total = torch.logsumexp(log_a, -1, keepdim=True)
    return log_a - torch.where(total > -torch.inf, total, 0)


def check_finite(name: str, scores: Num[Tensor, "*head t"]) -> None:
    """Raise ``ValueError`` for NaN and infinite scores; asks the device."""
    if not torch.isfinite(scores).all():
        kind = "NaN" if torch.isnan(scores).any() else "infinite values"
        raise ValueError(f"{name} must be finite, got {kind}")
