"""Binomial variates: their law for every size, the same on every path, and both ends of every argument."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from kvpress_prob.maths import binomial as module
from kvpress_prob.maths.binomial import SMALL_MEAN, binomial
from kvpress_prob.maths.random import streams

N = 100_000
CASES = [
    (1, 0.3),
    (5, 0.5),
    (30, 0.9),
    (1000, 0.0099),
    (10**15, 5e-15),
    (20, 0.5),  # here and below the mean is at least 10: rejection
    (40, 0.25),
    (1000, 0.01),
    (10**6, 0.7),
    (10**9, 0.5),
    (10**12, 0.2),
    (10**15, 1e-14),
    (10**15, 0.5),
]


def drawn(n, p, seed=0, size=N):
    count, probability = (torch.full((size,), value, dtype=torch.float64) for value in (n, p))
    return binomial(count, probability, streams(seed, torch.arange(size)))


@pytest.mark.parametrize(("n", "p"), CASES)
def test_the_law(n, p):
    """Chi-square over 50 stretches of about equal probability, and mean and variance within 4.5 deviations."""
    x = drawn(n, p).numpy()
    law = stats.binom(n, p)
    assert ((x == np.floor(x)) & (x >= 0) & (x <= n)).all()
    edges = np.unique(law.ppf(np.linspace(0.02, 0.98, 49)))
    probability = np.diff(law.cdf(edges), prepend=0, append=1)
    if probability[-1] * N < 5:
        edges, probability = edges[:-1], np.append(probability[:-2], probability[-2:].sum())
    observed = np.bincount(np.searchsorted(edges, x), minlength=len(edges) + 1)
    assert stats.chisquare(observed, probability * N).pvalue > 1e-4
    variance = n * p * (1 - p)
    assert abs(x.mean() - n * p) / (variance / N) ** 0.5 < 4.5
    kurtosis = 3 + (1 - 6 * p * (1 - p)) / variance
    assert abs(((x - n * p) ** 2).mean() / variance - 1) / ((kurtosis - 1) / N) ** 0.5 < 4.5


@pytest.mark.parametrize(("n", "p"), [(20, 0.5), (1000, 0.01), (1000, 0.0099), (4, 0.5)])
def test_single_values_have_their_probabilities(n, p):
    """Every value that is expected at least ten times, on both sides of the change of method."""
    observed = np.bincount(drawn(n, p, 1).long().numpy(), minlength=n + 1)
    expected = N * stats.binom(n, p).pmf(np.arange(n + 1))
    common = expected >= 10
    z = (observed - expected)[common] / np.sqrt(expected * (1 - expected / N))[common]
    assert np.abs(z).max() < 4.5


@pytest.mark.parametrize("seed", [0, 1])
def test_neighbouring_streams_are_independent(seed):
    x = drawn(10**6, 0.3, seed)
    y = (x - x.mean()) / x.std()
    for lag in (1, 2, 64):
        assert abs(float((y[:-lag] * y[lag:]).mean())) * N**0.5 < 4.5


def test_ends():
    n = torch.tensor([0.0, 0, 7, 7, 10**15, 10**15, 1]).double()
    p = torch.tensor([0.0, 0.5, 0, 1, 0, 1, 1]).double()
    want = torch.tensor([0.0, 0, 0, 7, 0, 10**15, 1]).double()
    assert torch.equal(binomial(n, p, streams(0, torch.arange(7))), want)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-53])
@pytest.mark.parametrize(("n", "p"), [(3, 0.5), (19, 0.5), (10**15, 9e-15), (10**15, 1e-30), (500, 1e-4)])
def test_inversion_at_both_ends_of_the_uniform(n, p, u, monkeypatch):
    """u = 0 gives the smallest value, u -> 1 one whose tail is beyond what a uniform can tell, never more than n."""
    monkeypatch.setattr(module, "uniforms_of", lambda stream: torch.full(stream.shape, u, dtype=torch.float64))
    x = float(drawn(n, p, size=1))
    assert x <= n
    assert x == 0 if u == 0 else stats.binom(n, p).sf(x) < 1e-15


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2**-53])
@pytest.mark.parametrize(("n", "p"), [(20, 0.5), (10**15, 0.5), (10**15, 1e-14)])
def test_rejection_at_both_ends_of_the_uniforms_stays_in_range(n, p, u, monkeypatch):
    monkeypatch.setattr(module, "uniforms_of", lambda stream: torch.full(stream.shape, u, dtype=torch.float64))
    x = float(drawn(n, p, size=1))
    assert math.isfinite(x)
    assert 0 <= x <= n


def test_log_probabilities_are_scipys_and_nothing_cancels():
    for n, p in ((60, 0.3), (10**6, 0.01), (10**15, 0.4)):
        law = stats.binom(n, p)
        k = np.unique(np.clip(np.round(law.mean() + law.std() * np.linspace(-6, 6, 200)), 0, n))
        mode = np.floor((n + 1) * p)
        count, probability = (torch.full((len(k),), value, dtype=torch.float64) for value in (n, p))
        at_k, at_mode = (
            module._log_probability(torch.from_numpy(at), count, probability) for at in (k, np.full_like(k, mode))
        )
        # Near a huge mean the ratio of neighbours is the normal law's, which is exact enough to compare with.
        want = law.logpmf(k) - law.logpmf(mode) if n < 10**9 else -((k - n * p) ** 2) / (2 * n * p * (1 - p))
        np.testing.assert_allclose((at_k - at_mode).numpy(), want, atol=1e-6)


def test_seven_of_ten_attempts_are_accepted_at_worst(monkeypatch):
    sizes, real = [], module._log_probability
    monkeypatch.setattr(module, "_log_probability", lambda k, n, p: sizes.append(len(k)) or real(k, n, p))
    for p in (1e-12, 0.1, 0.3, 0.5):
        for mean in (SMALL_MEAN, 11, 20, 1e3):
            sizes.clear()
            drawn(math.ceil(mean / p), p, size=20_000)
            assert sizes[2] / sizes[1] < 0.3


@pytest.mark.parametrize(("n", "p"), CASES)
def test_elements_that_leave_early_change_nothing(n, p):
    """The CPU drops finished elements; an accelerator computes all of them to the end. Fake device: no narrowing."""
    count, probability = (torch.full((2000,), value, dtype=torch.float64) for value in (n, min(p, 1 - p)))
    stream = streams(0, torch.arange(2000))
    method = module._by_rejection if n * min(p, 1 - p) >= SMALL_MEAN else module._by_inversion
    assert torch.equal(
        method(count, probability, stream, narrow=True), method(count, probability, stream, narrow=False)
    )


def test_a_variate_does_not_depend_on_its_neighbours():
    count = torch.tensor([3.0, 10**6, 50, 10**15, 0]).double().repeat(1000)
    probability = torch.rand(5000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    stream = streams(0, torch.arange(5000))
    together = binomial(count, probability, stream)
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(1))[:777]
    assert torch.equal(binomial(count[order], probability[order], stream[order]), together[order])
