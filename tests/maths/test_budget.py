"""The budget: E[J(m)] against simulation, the solvers' bounds, and that they end for every proposal."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.maths.budget import MAX_DRAWS, expected_distinct, keep_probability, solve_draws, solve_inclusion
from kvpress_prob.maths.proposals import normalise


def dirichlet(heads, t, concentration, generator):
    gamma = torch._standard_gamma(torch.full((heads, t), concentration, dtype=torch.float64), generator=generator)
    return normalise(gamma)


def one_group(heads):
    return torch.zeros(heads, dtype=torch.int64)


def test_expected_distinct_is_its_equation():
    pi = torch.tensor([[0.5, 0.3, 0.2, 0.0]], dtype=torch.float64)
    want = sum(1 - (1 - p) ** 7 for p in (0.5, 0.3, 0.2))
    assert expected_distinct(pi, torch.tensor([7.0]).double()).item() == pytest.approx(want)


def test_keep_probability_of_tiny_proposals_and_many_draws():
    pi = torch.tensor([[1e-15, 1.0]], dtype=torch.float64)
    got = keep_probability(pi, torch.tensor([1e12]).double())
    assert got[0, 0].item() == pytest.approx(1e-3, rel=1e-3)
    assert got[0, 1].item() == 1


def test_expected_distinct_against_simulation(generator):
    pi = dirichlet(1, 40, 0.5, generator)
    draws, repeats = 60, 4000
    samples = torch.multinomial(pi.expand(repeats, -1), draws, replacement=True, generator=generator)
    distinct = torch.tensor([len(set(row.tolist())) for row in samples]).double()
    want = expected_distinct(pi, torch.tensor([float(draws)]).double()).item()
    z = (distinct.mean() - want) / (distinct.std() / repeats**0.5)
    assert abs(z) < 4


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("concentration", [0.3, 5.0])
def test_draws_hit_the_target_within_half_an_entry_a_head(ratio, concentration, generator):
    heads, t = 12, 300
    pi = dirichlet(heads, t, concentration, generator)
    target = torch.tensor([(1 - ratio) * heads * t], dtype=torch.float64)
    draws = solve_draws(pi, torch.ones(heads).double(), one_group(heads), target)
    assert draws.unique().numel() == 1
    assert abs(expected_distinct(pi, draws.double()).sum() - target) <= 0.5 * heads


def test_groups_are_solved_separately(generator):
    pi = torch.cat([dirichlet(3, 100, 0.3, generator), dirichlet(3, 100, 3.0, generator)])
    group = torch.tensor([0, 0, 0, 1, 1, 1])
    target = torch.tensor([90.0, 210.0]).double()
    draws = solve_draws(pi, torch.ones(6).double(), group, target)
    got = expected_distinct(pi, draws.double()).view(2, 3).sum(1)
    assert ((got - target).abs() <= 1.5).all()
    q = solve_inclusion(pi, group, target, torch.ones(6).double())
    torch.testing.assert_close(q.sum(-1).view(2, 3).sum(1), target)


def test_shares_scale_the_draws(generator):
    pi = dirichlet(2, 200, 1.0, generator)
    draws = solve_draws(pi, torch.tensor([0.5, 1.5]).double(), one_group(2), torch.tensor([100.0]).double())
    assert draws[1].item() == pytest.approx(3 * draws[0].item(), rel=0.05)


def test_the_search_ends_when_the_support_is_smaller_than_the_target():
    pi = torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64)
    draws = solve_draws(pi, torch.ones(1).double(), one_group(1), torch.tensor([3.0]).double())
    assert 1 <= draws.item() <= MAX_DRAWS
    q = solve_inclusion(pi, one_group(1), torch.tensor([3.0]).double(), torch.ones(1).double())
    assert q.tolist() == [[1, 0, 0, 0]]


def test_inclusion_is_proportional_below_one(generator):
    weights = dirichlet(4, 50, 0.3, generator)
    q = solve_inclusion(weights, one_group(4), torch.tensor([60.0]).double(), torch.zeros(4).double())
    assert q.sum().item() == pytest.approx(60, rel=1e-9)
    scale = (q / weights)[q < 1]
    torch.testing.assert_close(scale, scale[:1].expand_as(scale))
    assert (weights[q == 1].min() * scale[0] >= 1 - 1e-9).all()


def test_a_head_with_little_weight_is_raised_to_one_entry():
    """Scenario S2: one head's scores 1e-6 of the others' under one budget for all."""
    weights = torch.rand(3, 100, dtype=torch.float64)
    weights[1] *= 1e-6
    target = torch.tensor([60.0]).double()
    q = solve_inclusion(weights, one_group(3), target, torch.ones(3).double())
    assert q[1].sum().item() == pytest.approx(1)
    assert q.sum().item() == pytest.approx(60, rel=1e-9)
    without = solve_inclusion(weights, one_group(3), target, torch.zeros(3).double())
    assert without[1].sum() < 1e-3


def test_a_target_of_zero_draws_nothing():
    weights = torch.rand(2, 10, dtype=torch.float64)
    q = solve_inclusion(weights, one_group(2), torch.zeros(1).double(), torch.zeros(2).double())
    assert (q == 0).all()


@given(
    st.lists(st.floats(0, 1e6) | st.just(0.0) | st.floats(1e-30, 1e-20), min_size=2, max_size=40),
    st.floats(0.01, 1.0),
)
def test_both_solvers_end_and_stay_in_bounds(weights, fraction):
    weights = torch.tensor([weights], dtype=torch.float64)
    t = weights.shape[1]
    target = torch.tensor([fraction * t], dtype=torch.float64)
    floor = (weights > 0).any(-1).double()
    q = solve_inclusion(weights, one_group(1), target, floor)
    assert ((q >= 0) & (q <= 1)).all()
    assert (q[weights == 0] == 0).all()
    support = int((weights > 0).sum())
    want = min(max(target.item(), floor.item()), support)
    assert q.sum().item() == pytest.approx(want, rel=1e-6)
    draws = solve_draws(normalise(weights), floor, one_group(1), target)
    assert 1 <= draws.item() <= MAX_DRAWS
