"""Weights: their equations, the unbiasedness of the weighted mass, and the error of the self-normalised estimator."""

import math

import pytest
import torch

from kvpress_prob.maths.draw import DrawSettings, Proposal, draw
from kvpress_prob.maths.importance import (
    effective_sample_size,
    log_weights_from_counts,
    log_weights_from_inclusion,
    temper,
    truncate,
)
from kvpress_prob.maths.random import streams
from kvpress_prob.maths.sampling import multinomial_counts


def test_counts_weights_are_their_equation():
    counts = torch.tensor([[3, 0, 1]])
    pi = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    got = log_weights_from_counts(counts, pi, torch.tensor([4]))
    want = [[math.log(3 / (4 * 0.5)), 0, math.log(1 / (4 * 0.25))]]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64))


def test_inclusion_weights_are_their_equation():
    kept = torch.tensor([[True, False, True]])
    got = log_weights_from_inclusion(kept, torch.tensor([[0.25, 0.5, 1.0]]))
    torch.testing.assert_close(got, torch.tensor([[math.log(4), 0, 0]], dtype=torch.float64))


def test_temperature_divides_the_logarithm():
    log_w = torch.tensor([[1.0, -2.0]])
    assert torch.equal(temper(log_w, 1), log_w)
    assert torch.equal(temper(log_w, 4), log_w / 4)
    assert (temper(log_w, math.inf) == 0).all()


def test_effective_sample_size():
    log_w = torch.tensor([[0.0, 0, 0, 5], [0, 100, 0, 0]])
    kept = torch.tensor([[True, True, True, False], [True, True, True, True]])
    got = effective_sample_size(log_w, kept)
    torch.testing.assert_close(got, torch.tensor([3.0, 1.0], dtype=torch.float64))
    assert effective_sample_size(log_w[:1], torch.zeros(1, 4, dtype=torch.bool)).item() == 0


SCHEMES = [("multinomial", "counts"), ("multinomial", "inclusion"), ("systematic", "inclusion")]


@pytest.mark.parametrize(("sampler", "correction"), SCHEMES)
@pytest.mark.parametrize("budget_weighting", ["uniform", "score"])
def test_the_weighted_mass_is_unbiased(sampler, correction, budget_weighting, generator):
    """E[sum_i w_i f_i] = sum_i f_i for any f: here the mass of attention of a query that the proposal knows nothing
    of."""
    repeats, t = 3000, 60
    weights = torch.rand(t, dtype=torch.float64, generator=generator) ** 4 + 1e-3
    f = torch.softmax(3 * torch.randn(t, dtype=torch.float64, generator=generator), -1)
    take_all = torch.zeros(t, dtype=torch.bool)
    take_all[[5, 59]] = True
    weights[take_all] = 0
    result = draw(
        [Proposal(weights.expand(repeats, -1), budget_weighting=budget_weighting)],
        take_all.expand(repeats, -1),
        torch.zeros(repeats, dtype=torch.int64),
        keep_fraction=0.4,
        settings=DrawSettings(sampler, correction),
        stream=streams(0, torch.arange(repeats)),
    )
    mass = (result.kept * result.log_w.double().exp() * f).sum(-1)
    z = (mass.mean() - 1) / (mass.std() / repeats**0.5)
    assert abs(z) < 4.5
    assert mass.std() > 0.01


def test_the_error_of_the_self_normalised_estimator_falls_like_one_over_m(generator):
    """Mean squared error of Algorithm 1 is O(1/m) (Agapiou et al., 2017): log-log slope near -1."""
    t, dv, repeats = 200, 8, 1500
    pi = torch.rand(t, dtype=torch.float64, generator=generator) + 0.1
    pi /= pi.sum()
    p = torch.softmax(torch.randn(t, dtype=torch.float64, generator=generator), -1)
    values = torch.randn(t, dv, dtype=torch.float64, generator=generator)
    sizes = torch.tensor([100, 400, 1600, 6400])
    errors = []
    for m in sizes.tolist():
        draws = torch.full((repeats,), m)
        counts = multinomial_counts(pi.expand(repeats, -1), draws, streams(0, m, torch.arange(repeats)))
        weighted = (counts > 0) * log_weights_from_counts(counts, pi.expand(repeats, -1), draws).exp() * p
        estimate = weighted @ values / weighted.sum(-1, keepdim=True)
        errors.append((estimate - p @ values).square().sum(-1).mean())
    x, y = sizes.double().log(), torch.stack(errors).log()
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    assert slope.item() == pytest.approx(-1, abs=0.1)


def test_inclusion_weights_have_less_error_than_counts(generator):
    """The same kept sets, without the noise of the counts: the reason for correction="inclusion". The later query's
    distribution is near the proposal but not equal to it."""
    t, dv, repeats = 200, 8, 2000
    weights = torch.rand(t, dtype=torch.float64, generator=generator) ** 2 + 0.01
    p = weights * torch.exp(torch.randn(t, dtype=torch.float64, generator=generator))
    values = torch.randn(t, dv, dtype=torch.float64, generator=generator)
    errors = {}
    for correction in ("counts", "inclusion"):
        result = draw(
            [Proposal(weights.expand(repeats, -1))],
            torch.zeros(repeats, t, dtype=torch.bool),
            torch.zeros(repeats, dtype=torch.int64),
            keep_fraction=0.5,
            settings=DrawSettings("multinomial", correction),
            stream=streams(1, torch.arange(repeats)),
        )
        weighted = result.kept * result.log_w.double().exp() * p
        estimate = weighted @ values / weighted.sum(-1, keepdim=True)
        errors[correction] = (estimate - p @ values / p.sum()).square().sum(-1).mean()
    assert errors["inclusion"] < 0.8 * errors["counts"]


def test_a_largest_weight_leaves_smaller_ones_alone():
    log_w = torch.tensor([0.0, 0.5, 3.0]).double()
    assert torch.equal(truncate(log_w, math.inf), log_w)
    torch.testing.assert_close(truncate(log_w, 2.0).exp(), torch.tensor([1.0, math.exp(0.5), 2.0]).double())
    assert torch.equal(truncate(log_w, 1.0), torch.zeros(3).double())
