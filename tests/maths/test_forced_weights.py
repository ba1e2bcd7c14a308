"""Kept sets with forced weights: the text's own examples, exact rational references, bounds for any row."""

from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize

from kvpress_prob.maths.budget import solve_inclusion
from kvpress_prob.maths.forced_weights import (
    EXTRA,
    attention_rows,
    balance,
    best_subset,
    candidate_pool,
    closable_share,
    deviation_norm,
    dropped_mass,
    forced_error,
    free_weight_error,
    gap_ratio,
    group_vote,
    top_mass,
    weighted_error,
)
from kvpress_prob.maths.sampling import systematic_sample


def line(values, masses=None):
    """One row over points on a line; uniform masses by default."""
    masses = masses or [1 / len(values)] * len(values)
    return attention_rows(torch.tensor([masses], dtype=torch.float64), torch.tensor(values).double()[:, None])


def random_rows(generator, r=40, n=24, d=3, sharpness=2.0):
    masses = (sharpness * torch.randn(r, n, generator=generator, dtype=torch.float64)).softmax(-1)
    return attention_rows(masses, torch.randn(r, n, d, generator=generator, dtype=torch.float64))


def exact_error(values, masses, kept):
    """``|sum_A p v / p(A) - sum p v|`` on a line, in rational numbers."""
    mean = sum((p * v for p, v in zip(masses, values, strict=True)), Fraction())
    mass = sum((masses[i] for i in kept), Fraction())
    return abs(sum((masses[i] * values[i] for i in kept), Fraction()) / mass - mean)


def exact_minimum(values, masses, s):
    return min(exact_error(values, masses, kept) for kept in combinations(range(len(values)), s))


def test_the_text_s_example():
    rows = line([-1.0, 1, 5], [0.45, 0.45, 0.1])
    top = top_mass(rows.masses, 2)
    assert top.tolist() == [[0, 1]]
    assert forced_error(rows, top).item() == pytest.approx(1 / 2, rel=1e-14)
    pool = candidate_pool(rows, 2, 24)
    best, kept = best_subset(rows.at(pool), 2)
    assert best.item() == pytest.approx(9 / 22, rel=1e-14)
    assert sorted(pool.gather(1, kept)[0].tolist()) == [0, 2]
    assert gap_ratio(forced_error(rows, top), best).item() == pytest.approx(11 / 9, rel=1e-14)
    assert closable_share(forced_error(rows, top), best).item() == pytest.approx(2 / 11, rel=1e-13)
    error, kept, swaps = balance(rows.at(pool), 2)
    assert (error.item(), kept.tolist(), swaps.tolist()) == (pytest.approx(9 / 22, rel=1e-14), [[0, 2]], [1])
    assert free_weight_error(rows, 2).item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(
    ("kept", "error"),
    [((2,), "1/2"), ((0, 2), "1/2"), ((1, 2), "0"), ((0, 1, 2), "1/2"),
     ((1,), "1/2"), ((0, 1), "1"), ((1, 3), "1/2"), ((0, 1, 3), "1/6")],
)  # fmt: skip
def test_neither_submodular_nor_supermodular(kept, error):
    """Adding key 0 helps a superset less than a set ({2}, {1, 2}), and another superset more ({1}, {1, 3})."""
    values, masses = [0, 1, 2, 3], [Fraction(1, 4)] * 4
    assert exact_error(values, masses, kept) == Fraction(error)
    got = forced_error(line([0.0, 1, 2, 3]), torch.tensor([kept])).item()
    assert got == pytest.approx(float(Fraction(error)), abs=1e-15)


@pytest.mark.parametrize(
    ("numbers", "minimum"),
    [((1, 2, 3), "0"), ((3, 1, 1, 2, 2, 1), "0"), ((5, 5, 4, 3, 3), "0"), ((1, 2, 3, 4, 6), "0"),
     ((1, 2, 4), "1/6"), ((1, 1, 3), "1/6"), ((2, 2, 3), "1/6")],
)  # fmt: skip
def test_partition_instances(numbers, minimum):
    """n integers and n zeros of equal mass, s = n: no error is left exactly where the integers split evenly."""
    n = len(numbers)
    values = [*numbers, *[0] * n]
    assert exact_minimum(values, [Fraction(1, 2 * n)] * 2 * n, n) == Fraction(minimum)
    rows = line([float(value) for value in values])
    best, kept = best_subset(rows.at(candidate_pool(rows, n, n)), n)
    assert best.item() == pytest.approx(float(Fraction(minimum)), abs=1e-15)
    assert len(set(kept[0].tolist())) == n
    places = candidate_pool(rows, n, n).gather(1, kept)[0]
    assert (2 * sum(values[i] for i in places) == sum(numbers)) == (minimum == "0")


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(-20, 20)), min_size=3, max_size=8),
    st.integers(1, 7),
)
def test_the_minimum_against_rational_enumeration(entries, s):
    s = min(s, len(entries) - 1)
    total = sum(mass for mass, _ in entries)
    masses, values = [Fraction(mass, total) for mass, _ in entries], [value for _, value in entries]
    rows = line([float(value) for value in values], [float(mass) for mass in masses])
    best, _ = best_subset(rows.at(candidate_pool(rows, s, len(entries))), s)
    # Two sets closer than half of float64's digits are one to the Gram matrix.
    assert best.item() == pytest.approx(float(exact_minimum(values, masses, s)), abs=1e-6)
    assert best.item() > -1e-15


@given(st.integers(0, 10**6), st.integers(1, 10), st.floats(0, 12))
def test_order_of_the_errors(seed, s, sharpness):
    """ES_pool <= balancing <= es(A_s) <= 2 max |v - mu| m_s, and EF <= ES."""
    rows = random_rows(torch.Generator().manual_seed(seed), r=8, n=14, sharpness=sharpness)
    top = top_mass(rows.masses, s)
    places = candidate_pool(rows, s, 14)
    pool = rows.at(places)
    (best, winner), (balanced, kept, swaps) = best_subset(pool, s), balance(pool, s)
    error = forced_error(rows, top)
    # Of errors below 1e-7 of the points the Gram matrix cannot tell which is the smallest.
    slack = 1e-7 * rows.radius
    assert (best <= balanced + slack).all()
    assert (balanced <= error).all()
    assert (error <= 2 * rows.radius * dropped_mass(rows.masses, top) + 1e-12).all()
    assert ((swaps == 0) == (balanced == error)).all()
    torch.testing.assert_close(forced_error(rows, places.gather(1, winner)), best)
    torch.testing.assert_close(forced_error(rows, places.gather(1, kept)), balanced)
    assert (gap_ratio(error, best) >= 1).all()
    assert ((closable_share(error, best) >= 0) & (closable_share(error, best) <= 1)).all()


def test_deleting_one_key_costs_its_odds_times_its_distance(generator):
    """es of all keys but j: p_j / (1 - p_j) |v_j - mu|."""
    rows = random_rows(generator, r=5, n=9)
    for j in range(9):
        kept = torch.tensor([[i for i in range(9) if i != j]] * 5)
        p = rows.masses[:, j]
        torch.testing.assert_close(forced_error(rows, kept), p / (1 - p) * rows.points[:, j].norm(dim=-1))


def test_errors_are_those_of_the_renormalised_average(generator):
    masses = torch.randn(6, 30, generator=generator, dtype=torch.float64).softmax(-1)
    values = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    rows = attention_rows(masses, values)
    kept = top_mass(masses, 7)
    for row in range(6):
        p, v = masses[row, kept[row]], values[kept[row]]
        want = (p @ v / p.sum() - masses[row] @ values).norm()
        torch.testing.assert_close(forced_error(rows, kept)[row], want)
        torch.testing.assert_close(dropped_mass(masses, kept)[row], 1 - p.sum())
        torch.testing.assert_close(deviation_norm(rows, kept)[row], want * p.sum())


def test_all_keys_leave_no_error(generator):
    rows = random_rows(generator, r=6, n=12, sharpness=9.0)
    everything = top_mass(rows.masses, 12)
    assert (forced_error(rows, everything) == 0).all()
    zero = torch.zeros(6, dtype=torch.float64)
    assert (gap_ratio(zero, zero) == 1).all()
    assert (closable_share(zero, zero) == 0).all()


def test_one_key_with_all_the_mass():
    """What is left of an error is rounding, and counts as none."""
    rows = line([3.0, 4, -2, 7], [1 - 3e-19, 1e-19, 1e-19, 1e-19])
    for s in (1, 2):
        assert forced_error(rows, top_mass(rows.masses, s)).item() == 0
        assert balance(rows.at(candidate_pool(rows, s, 2)), s)[2].item() == 0


def test_keys_that_a_row_does_not_see_never_help(generator):
    """A row padded with keys of mass 0 has the errors of the short row."""
    masses = torch.randn(4, 10, generator=generator, dtype=torch.float64).softmax(-1)
    values = torch.randn(4, 10, 2, generator=generator, dtype=torch.float64)
    short = attention_rows(masses, values)
    padded = attention_rows(
        torch.nn.functional.pad(masses, (0, 6)), torch.nn.functional.pad(values, (0, 0, 0, 6), value=50.0)
    )
    assert torch.equal(padded.radius, short.radius)
    for s in (1, 3, 9):
        results = []
        for rows in (short, padded):
            pool = rows.at(candidate_pool(rows, s, 12))
            results.append((best_subset(pool, s)[0], balance(pool, s)[0], free_weight_error(rows, s)))
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("s", EXTRA)
def test_pools_have_the_text_s_size(generator, s):
    rows = random_rows(generator, r=3, n=200)
    pool = candidate_pool(rows, s, EXTRA[s])
    assert pool.shape == (3, s + EXTRA[s])
    assert torch.equal(pool[:, :s], top_mass(rows.masses, s))
    single = rows.deviations.norm(dim=-1)
    for row in range(3):
        chosen, rest = pool[row].tolist(), set(range(200)) - set(pool[row].tolist())
        assert len(set(chosen)) == s + EXTRA[s]
        assert single[row, pool[row, s:]].min() >= max(single[row, list(rest)]).item()


def test_balancing_ends_where_no_swap_helps(generator):
    rows = random_rows(generator, r=20, n=16)
    pool = rows.at(candidate_pool(rows, 4, 12))
    error, kept, swaps = balance(pool, 4)
    assert (swaps > 0).any()
    for row in range(20):
        dropped = set(range(16)) - set(kept[row].tolist())
        for out in range(4):
            for new in dropped:
                swapped = kept[row].clone()
                swapped[out] = new
                attempt = forced_error(pool, swapped.expand(20, -1))[row]
                assert attempt >= error[row] * (1 - 1e-9)


def test_free_weights_against_quadratic_programs(generator):
    """For two of six points: the distance to the segment of one of the pairs, with its best weights."""
    rows = random_rows(generator, r=10, n=6, d=2, sharpness=0.5)
    estimate = free_weight_error(rows, 2)
    for row in range(10):
        found = []
        for pair in combinations(range(6), 2):
            points = rows.points[row, list(pair)].numpy()
            distance = minimize(lambda x, q=points: ((x[0] * q[0] + (1 - x[0]) * q[1]) ** 2).sum(), [0.5],
                                bounds=[(0, 1)], tol=1e-14).fun  # fmt: skip
            found.append(distance**0.5)
        assert min(abs(estimate[row].item() - distance) for distance in found) < 1e-6
        assert estimate[row] > min(found) - 1e-6
    whole = free_weight_error(rows, 6, polish=20000)  # the mean itself is in the hull of all
    assert (whole < 1e-2 * rows.radius).all()
    assert (free_weight_error(rows, 1) == rows.points.norm(dim=-1).amin(-1)).all()


def test_group_vote_keeps_the_largest_sums():
    masses = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.0, 0.1, 0.4, 0.5]]).double()
    assert group_vote(masses, 2).tolist() == [2, 0]
    assert group_vote(masses[:1], 3).tolist() == top_mass(masses[:1], 3)[0].tolist()


def test_weighted_error_by_hand_and_in_the_mean(generator):
    """By its formula for one draw; over draws the unnormalised sum has mean 0 (a z-test)."""
    rows = random_rows(generator, r=1, n=20, d=1, sharpness=1.0)
    q = solve_inclusion(rows.masses, torch.zeros(1, dtype=torch.long), torch.tensor([6.0]).double(), torch.ones(1))
    trials = 4000
    kept = systematic_sample(q.expand(trials, -1), torch.rand(trials, generator=generator, dtype=torch.float64))
    p, x = rows.masses[0], rows.points[0, :, 0]
    weights = torch.where(kept, p / q[0], 0)
    many = attention_rows(p.expand(trials, -1), x[:, None])
    want = ((weights @ x) / weights.sum(1)).abs()
    torch.testing.assert_close(weighted_error(many, q.expand(trials, -1), kept), want)
    total = weights @ x
    assert abs(total.mean() / (total.std() / trials**0.5)) < 4
    everything = torch.ones(1, 20, dtype=torch.bool)
    assert weighted_error(rows, torch.ones(1, 20).double(), everything).item() == 0


def test_refusals():
    with pytest.raises(ValueError, match=r"masses must be non-negative and sum to 1 in every row, got sums"):
        attention_rows(torch.tensor([[0.5, 0.4]]), torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"rows must see at least s = 3 keys, got one that sees 2"):
        candidate_pool(line([1.0, 2, 3], [0.5, 0.5, 0]), 3, 4)
    with pytest.raises(ValueError, match=r"masses must be non-negative"):
        attention_rows(torch.tensor([[1.5, -0.5]]), torch.zeros(2, 1))
    for s in (0, 4):
        with pytest.raises(ValueError, match=rf"s must be in \[1, 3\], the number of keys, got {s}"):
            top_mass(torch.ones(1, 3) / 3, s)
