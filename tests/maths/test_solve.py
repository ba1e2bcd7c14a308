"""The solvers over sorted prefix sums against plain bisections over every entry."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.maths.budget import solve_log_inclusion, union_inclusion
from kvpress_prob.maths.solve import bisect, solve_scale
from tests.helpers.plain_solvers import plain_log_inclusion, plain_union

INF = float("inf")


def random_logs(heads, t, sharpness, seed, empty=0.2):
    generator = torch.Generator().manual_seed(seed)
    logs = sharpness * torch.randn(heads, t, dtype=torch.float64, generator=generator)
    hidden = torch.rand(heads, t, generator=generator) < empty
    return logs.masked_fill(hidden, -INF)


@given(
    st.integers(1, 6),
    st.integers(1, 60),
    st.sampled_from([0.01, 1.0, 8.0, 100.0, 2000.0]),
    st.floats(0.0, 1.2),
    st.integers(1, 3),
    st.booleans(),
    st.integers(0, 999),
)
def test_inclusion_is_that_of_plain_bisection(heads, t, sharpness, fraction, groups, floored, seed):
    log_a = random_logs(heads, t, sharpness, seed)
    group = torch.arange(heads) % groups
    target = fraction * t * torch.bincount(group, minlength=groups).double()
    at_least = floored * (log_a > -INF).any(-1).double()
    got = solve_log_inclusion(log_a, group, target, at_least).exp()
    want = plain_log_inclusion(log_a, group, target, at_least).exp()
    torch.testing.assert_close(got, want, atol=1e-8, rtol=1e-7)


@given(
    st.integers(1, 5),
    st.integers(1, 50),
    st.integers(1, 4),
    st.sampled_from([0.1, 1.0, 5.0, 50.0]),
    st.floats(0.05, 0.95),
    st.booleans(),
    st.integers(0, 999),
)
def test_unions_of_any_number_of_parts_are_those_of_plain_bisection(heads, t, count, sharpness, keep, floored, seed):
    group, target = torch.zeros(heads, dtype=torch.int64), torch.tensor([keep * heads * t]).double()
    none = torch.zeros(heads).double()
    parts = [
        plain_log_inclusion(random_logs(heads, t, sharpness, seed + 1000 * k), group, target / count, none)
        for k in range(count)
    ]
    possible = torch.stack(parts).amax(0) > -INF
    at_least = floored * possible.any(-1).double()
    got = union_inclusion(parts, group, target, at_least)
    want = plain_union(parts, group, target, at_least)
    # Where parts have probabilities near 1 the total hardly depends on c: totals are compared, then entries.
    assert float(got.sum()) == pytest.approx(float(want.sum()), rel=1e-9)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-6)


def test_the_total_is_met_to_rounding_on_long_contexts():
    log_a = random_logs(8, 20_000, 3.0, 0)
    group, target = torch.zeros(8, dtype=torch.int64), torch.tensor([24_000.0]).double()
    q = solve_log_inclusion(log_a, group, target, torch.ones(8).double()).exp()
    assert float(q.sum()) == pytest.approx(24_000, rel=1e-9)


def test_the_scale_of_one_part_is_its_equation():
    """Three entries 4, 2, 1 and target 2: the first is certain, the others share 1 as 2 to 1."""
    log_a = torch.tensor([[4.0, 1.0, 2.0]]).double().log()
    zero = torch.zeros(1, dtype=torch.int64)
    low = torch.tensor([-9.0]).double()
    log_c, reachable = solve_scale([log_a], zero, torch.tensor([2.0]).double(), torch.zeros(1).double(), low)
    assert reachable.all()
    assert log_c.exp().item() == pytest.approx(1 / 3)


def test_whole_numbers_end_as_neighbours():
    low, high = bisect(
        lambda m: m.double() ** 2, torch.tensor([50.0, 49.0]), torch.tensor([1, 1]), torch.tensor([1000, 1000]), 12
    )
    assert (low.tolist(), high.tolist()) == ([7, 6], [8, 7])
