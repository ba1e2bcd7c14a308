r"""Random numbers that are a function of where they are used: counter-based streams.

A *stream* is 64 bits, hashed from a seed and any number of counters (layer, head, position, round, ...), one counter
after the other::

    s_0 = seed,      s_k = mix(s_{k-1} + G (c_k + 1))  mod 2^64,      u = floor(s / 2^11) / 2^53  in [0, 1)

with ``mix`` the finaliser of SplitMix64 and ``G`` its increment (Steele, Lea and Flood, Fast splittable pseudorandom
number generators, 2014), so the streams of consecutive counters are SplitMix64's own sequence from a hashed start.
Nothing has a state: a number depends on its seed and counters alone, not on what was drawn before, on the shape of the
tensor it is in, on its batch or its device. Whole numbers are hashed, so every device gives the same bits. (The idea is
that of Salmon and others, Parallel random numbers: as easy as 1, 2, 3, 2011.)
"""

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

_BITS = 2**64
_INCREMENT = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31

Counter = int | Int64[Tensor, "..."]


def streams(seed: int, *counters: Counter) -> Int64[Tensor, "..."]:
    """Streams of a seed, one for each combination of the counters.

    Parameters
    ----------
    seed : int
        From ``-2**63`` to ``2**64 - 1``; numbers that are equal modulo ``2**64`` name the same streams.
    *counters : int or Int64[Tensor, "..."]
        Broadcast together. Their order counts: (1, 2) and (2, 1) are different streams.

    Returns
    -------
    Int64[Tensor, "..."]
        On the counters' device; a single stream, on the CPU, when all of them are numbers.

    Raises
    ------
    ValueError
        If the seed is out of range.
    TypeError
        If a counter is a tensor of another dtype than int64.
    """
    if not -(2**63) <= seed < _BITS:
        raise ValueError(f"seed must be from -2**63 to 2**64 - 1, got {seed}")
    return fork(_signed(seed), *counters)


def fork(stream: Counter, *counters: Counter) -> Int64[Tensor, "..."]:
    """Streams of a stream: ``fork(streams(seed, a), b)`` is ``streams(seed, a, b)``."""
    for counter in counters:
        for value in (stream, counter):
            if isinstance(value, Tensor) and value.dtype != torch.int64:
                raise TypeError(f"counters must be whole numbers of dtype int64, got {value.dtype}")
        if isinstance(counter, Tensor):
            stream = _mix(stream + _signed(_INCREMENT) * counter + _signed(_INCREMENT))
        elif isinstance(stream, Tensor):
            stream = _mix(stream + _signed(_INCREMENT * (counter + 1)))
        else:
            stream = _signed(_mix_number(stream + _INCREMENT * (counter + 1)))
    return torch.tensor(stream, device="cpu") if isinstance(stream, int) else stream


def uniforms_of(stream: Int64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """A stream's uniform in [0, 1), a multiple of ``2**-53``."""
    return _shifted(stream, 11).double() * 2.0**-53


def uniforms(seed: int, *counters: Counter) -> Float64[Tensor, "..."]:
    """Uniforms in [0, 1) of a seed, one for each combination of the counters; see ``streams``."""
    return uniforms_of(streams(seed, *counters))


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser; int64 products wrap around as unsigned ones do."""
    for shift, factor in _ROUNDS:
        x = (x ^ _shifted(x, shift)) * _signed(factor)
    return x ^ _shifted(x, _LAST_SHIFT)


def _shifted(x: Tensor, by: int) -> Tensor:
    """``x >> by`` with zeros coming in: int64 would repeat the sign."""
    return (x >> by) & (2 ** (64 - by) - 1)


def _mix_number(x: int) -> int:
    """``_mix`` of one number, which asks no device for anything."""
    x %= _BITS
    for shift, factor in _ROUNDS:
        x = ((x ^ (x >> shift)) * factor) % _BITS
    return x ^ (x >> _LAST_SHIFT)


def _signed(x: int) -> int:
    """The int64 of the same 64 bits."""
    return (x + 2**63) % _BITS - 2**63
