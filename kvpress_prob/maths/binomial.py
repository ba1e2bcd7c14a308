r"""Exact binomial variates of any size, elementwise, from counter-based streams.

``X ~ Binomial(n, p)`` with ``p <= 1/2`` (else ``n - X`` is drawn), ``q = 1 - p``.

*Inversion* where ``n p < 10``: ``X = #{k >= 0: F(k) <= u}``, the cumulated probabilities from ``f(0) = q^n`` by
``f(k + 1) = f(k) (n - k) / (k + 1) p / q``.

*Transformed rejection* where ``n p >= 10`` (Hoermann, The generation of binomial random variates, 1993, algorithm BTRS
without its squeeze): with uniforms ``u`` in [-1/2, 1/2) and ``v``, ``w = 1/2 - |u|``::

    k = floor((2 a / w + b) u + n p + 1/2),     accepted if  log(v alpha / (a / w^2 + b)) <= log f(k) - log f(mode)

The ratio of probabilities is computed in the saddle-point form (Loader, Fast and accurate computation of binomial
probabilities, 2000), in which nothing cancels, so ``n`` may be as large as integers are exact in float64::

    log f(k) = s(n) - s(k) - s(n - k) - D(k, n p) - D(n - k, n q)
    s(k) = log k! - k log k + k,      D(x, m) = x log(x / m) + m - x

Every element uses the numbers of its own stream, so a variate is the same wherever its element stands and on every
device, but for what the rounding of logarithms decides.
"""

import math

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from kvpress_prob.maths.random import fork, uniforms_of

SMALL_MEAN = 10.0
"""Below this mean a variate is found by inversion, from it on by rejection."""
INVERSION_STEPS = 64
"""``P(X >= 64) < 1e-28`` for a mean below 10."""
ATTEMPTS = 32
"""At least seven of ten attempts are accepted, so with probability below 1e-16 none is; then the mode is taken."""

NARROWING = ("cpu",)
"""Devices on which elements leave the computation when they are done: where to look costs nothing."""
CPU_CHUNK = 2**16
"""Elements that the CPU works on at a time, few enough for its cache."""


def binomial(
    count: Float64[Tensor, "*shape"], probability: Float64[Tensor, "*shape"], stream: Int64[Tensor, "*shape"]
) -> Float64[Tensor, "*shape"]:
    """Binomial variates.

    Parameters
    ----------
    count : Float64[Tensor, "*shape"]
        ``n``, whole numbers from 0 to 1e15.
    probability : Float64[Tensor, "*shape"]
        In [0, 1].
    stream : Int64[Tensor, "*shape"]
        One stream (``random.streams``) per variate.

    Returns
    -------
    Float64[Tensor, "*shape"]
        Whole numbers from 0 to ``n``.

    Notes
    -----
    Nothing is read back from an accelerator: there both methods run for all elements with a fixed number of steps. On
    the CPU elements leave the computation when they are done, which changes no result.
    """
    shape = count.shape
    count, stream = count.flatten(), stream.flatten()
    mirrored = probability.flatten() > 0.5
    p = torch.where(mirrored, 1 - probability.flatten(), probability.flatten())
    large = count * p >= SMALL_MEAN
    if count.device.type in NARROWING:
        drawn = torch.zeros_like(count)
        for method, chosen in ((_by_inversion, ~large & (count > 0) & (p > 0)), (_by_rejection, large)):
            for place in chosen.nonzero().squeeze(-1).split(CPU_CHUNK):
                drawn[place] = method(count[place], p[place], stream[place], narrow=True)
    else:
        drawn = torch.where(
            large, _by_rejection(count, p, stream, narrow=False), _by_inversion(count, p, stream, narrow=False)
        )
    return torch.where(mirrored, count - drawn, drawn).view(shape)


def _by_inversion(count: Tensor, p: Tensor, stream: Tensor, narrow: bool) -> Tensor:
    u = uniforms_of(fork(stream, 0))
    f = torch.exp(torch.special.xlog1py(count, -p))
    odds = p / (1 - p)
    total, result = f, torch.zeros_like(count)
    place = None
    for k in range(INVERSION_STEPS):
        # Once the terms are below what a sum near 1 can hold, what is missing to u is rounding.
        pending = (total <= u) & (f > 2.0**-60)
        if narrow:
            still = pending.nonzero().squeeze(-1)
            if not len(still):
                break
            place = still if place is None else place[still]
            count, odds, u, f, total = (it[still] for it in (count, odds, u, f, total))
            result.index_fill_(0, place, k + 1)
        else:
            result = result + pending
        f = f * (count - k) / (k + 1) * odds
        total = total + f
    return result


def _by_rejection(count: Tensor, p: Tensor, stream: Tensor, narrow: bool) -> Tensor:
    mean = count * p
    mode = ((count + 1) * p).floor()
    spread = (mean * (1 - p)).sqrt()
    b = 1.15 + 2.53 * spread
    a = -0.0873 + 0.0248 * b + 0.01 * p
    log_alpha = ((2.83 + 5.1 / b) * spread).log()
    top = _log_probability(mode, count, p)
    result, place = mode, None
    pending = torch.ones_like(mode, dtype=torch.bool)
    for attempt in range(ATTEMPTS):
        u = uniforms_of(fork(stream, 1, attempt)) - 0.5
        v = uniforms_of(fork(stream, 2, attempt))
        w = 0.5 - u.abs()
        k = ((2 * a / w + b) * u + mean + 0.5).floor()
        inside = (k >= 0) & (k <= count)
        k = torch.where(inside, k, mode)
        accepted = v.log() + log_alpha - (a / (w * w) + b).log() <= _log_probability(k, count, p) - top
        accepted &= inside
        if narrow:
            result = k.clone() if place is None else result.index_copy_(0, place, torch.where(accepted, k, mode))
            still = (~accepted).nonzero().squeeze(-1)
            if not len(still):
                break
            place = still if place is None else place[still]
            count, p, mean, mode, a, b, log_alpha, top, stream = (
                it[still] for it in (count, p, mean, mode, a, b, log_alpha, top, stream)
            )
        else:
            result = torch.where(pending & accepted, k, result)
            pending = pending & ~accepted
    return result


def _log_probability(k: Tensor, count: Tensor, p: Tensor) -> Tensor:
    """``log f(k) - s(n)``."""
    mean = count * p
    return -(_excess(k) + _excess(count - k) + _deviance(k, mean) + _deviance(count - k, count - mean))


def _excess(k: Tensor) -> Tensor:
    """``log k! - k log k + k``: Stirling's series from 16 on (its first term left out is below 2e-13 there)."""
    low = k.clamp(max=16)
    high = k.clamp(min=16)
    square = high * high
    series = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / 1680 / square) / square) / square) / high
    series = series + 0.5 * (2 * math.pi * high).log()
    return torch.where(k < 16, torch.lgamma(low + 1) - torch.xlogy(low, low) + low, series)


def _deviance(x: Tensor, mean: Tensor) -> Tensor:
    """``x log(x / m) + m - x`` for ``m > 0``."""
    relative = (x - mean) / mean
    return mean * (torch.special.xlog1py(1 + relative, relative) - relative)
