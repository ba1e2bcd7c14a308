"""Counter-based uniforms: known values, their law, independence of neighbouring counters, nothing else counts."""

import numpy as np
import pytest
import torch
from scipy import stats

from kvpress_prob.maths.random import fork, streams, uniforms, uniforms_of

SPLITMIX64_OF_0 = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC)
"""The published first outputs of SplitMix64 seeded with 0."""
LEAST_P = 1e-4


def test_one_counter_is_the_sequence_of_splitmix64():
    got = streams(0, torch.arange(4))
    assert [value % 2**64 for value in got.tolist()] == list(SPLITMIX64_OF_0)
    want = [(value >> 11) / 2**53 for value in SPLITMIX64_OF_0]
    assert uniforms(0, torch.arange(4)).tolist() == want


def plain(seed, *counters):
    """The equation in the module's docstring in Python's whole numbers."""
    stream = seed
    for counter in counters:
        x = (stream + 0x9E3779B97F4A7C15 * (counter + 1)) % 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        stream = x ^ (x >> 31)
    return (stream >> 11) / 2**53


@pytest.mark.parametrize("seed", [0, 1, -1, 42, 2**63, 2**64 - 1, -(2**63)])
def test_uniforms_are_their_equation_whatever_the_mixture_of_numbers_and_tensors(seed):
    layer, head, position = 3, torch.arange(2), torch.tensor([0, 1, 130_000, 2**40])
    got = uniforms(seed, layer, head.unsqueeze(-1), position)
    assert got.dtype == torch.float64
    want = [[plain(seed, 3, int(h), int(p)) for p in position] for h in head]
    assert got.tolist() == want
    assert uniforms(seed, 3, 1, 130_000).item() == want[1][2]
    assert uniforms_of(fork(streams(seed, 3), head.unsqueeze(-1), position)).tolist() == want


def test_long_tensors_take_vector_instructions_and_give_the_same():
    long = uniforms(9, torch.arange(10_007))
    assert torch.equal(long[5003:5005], uniforms(9, torch.arange(5003, 5005)))
    assert long[10_006].item() == plain(9, 10_006)


def test_a_number_depends_on_its_seed_and_counters_alone():
    everything = uniforms(5, torch.arange(4).view(-1, 1, 1), torch.arange(3).view(-1, 1), torch.arange(50))
    part = uniforms(5, torch.tensor([2]).view(-1, 1, 1), torch.tensor([1]).view(-1, 1), torch.arange(20, 50))
    assert torch.equal(everything[2:3, 1:2, 20:], part)


def test_no_other_random_state_is_read_or_changed():
    before = torch.get_rng_state()
    first = uniforms(1, torch.arange(100))
    torch.manual_seed(123)
    assert torch.equal(first, uniforms(1, torch.arange(100)))
    torch.set_rng_state(before)
    uniforms(1, torch.arange(100))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_default_dtype_does_not_matter(dtype):
    want = uniforms(1, torch.arange(100))
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(uniforms(1, torch.arange(100)), want)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 2**70])
def test_seeds_out_of_range_are_refused(seed):
    with pytest.raises(ValueError, match=r"seed must be from -2\*\*63 to 2\*\*64 - 1"):
        streams(seed, 0)


def test_counters_must_be_whole_numbers():
    with pytest.raises(TypeError, match=r"counters must be whole numbers of dtype int64, got torch.float32"):
        uniforms(0, torch.arange(3.0))


def axes():
    """2^20 numbers along one counter, the others fixed: along seeds, layers, heads, positions and rounds."""
    n = 2**20
    yield "seeds", torch.stack([uniforms(seed, 7, 3, torch.arange(1024)) for seed in range(1024)]).T.flatten()
    for name, at in (("layers", 0), ("heads", 1), ("positions", 2), ("rounds", 3)):
        counters = [3, 5, 1000, 1]
        counters[at] = torch.arange(n)
        yield name, uniforms(11, *counters)


AXES = dict(axes())


@pytest.mark.parametrize("name", AXES)
def test_uniform_along_every_counter(name):
    u = AXES[name].numpy()
    assert u.min() >= 0
    assert u.max() < 1
    assert stats.kstest(u, "uniform").pvalue > LEAST_P
    # All eight octets of bits that a double keeps, the lowest ones too.
    bits = (u * 2**53).astype(np.int64)
    for shift in range(0, 48, 8):
        counts = np.bincount((bits >> shift) & 255, minlength=256)
        assert stats.chisquare(counts).pvalue > LEAST_P / 6


@pytest.mark.parametrize("lag", [1, 2, 3, 64])
@pytest.mark.parametrize("name", AXES)
def test_neighbouring_counters_are_independent(name, lag):
    """Pairs fill the unit square evenly, and the signs of their bits do not agree more often than half the time."""
    u = AXES[name].numpy()
    cells = (u[:-lag] * 32).astype(int) * 32 + (u[lag:] * 32).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > LEAST_P
    bits = (u * 2**53).astype(np.int64)
    different = np.unpackbits((bits[:-lag] ^ bits[lag:]).view(np.uint8)).reshape(-1, 64).mean(0)
    changing = different[different > 0]
    assert len(changing) == 53
    z = (changing - 0.5) * 2 * (len(u) - lag) ** 0.5
    assert np.abs(z).max() < 5


def test_swapped_and_shifted_counters_are_independent():
    a, b = torch.arange(1024).unsqueeze(-1), torch.arange(1024)
    pairs = (uniforms(0, a, b), uniforms(0, b.expand(1024, -1), a), uniforms(1, a, b), uniforms(0, a + 1, b))
    for other in pairs[1:]:
        off = ~torch.eye(1024, dtype=torch.bool)
        cells = (pairs[0][off] * 32).long() * 32 + (other[off] * 32).long()
        # The swapped square holds each pair twice, so counts vary twice as much: half the statistic is the bound.
        counts = cells.bincount(minlength=1024).double()
        statistic = float(((counts - counts.mean()) ** 2).sum() / counts.mean()) / (2 if other is pairs[1] else 1)
        assert stats.chi2(1023).sf(statistic) > LEAST_P


def test_no_two_of_four_million_streams_are_the_same():
    all_streams = streams(3, torch.arange(32).view(-1, 1, 1), torch.arange(32).view(-1, 1), torch.arange(4096))
    assert all_streams.unique().numel() == all_streams.numel()
