"""Draws are tested for their law: chi-square of the counts, inclusion frequencies, and both ends of every uniform."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from kvpress_prob.maths.random import streams
from kvpress_prob.maths.sampling import multinomial_counts, offsets, split_counts, systematic_sample


def stream_of(repeats):
    return streams(0, torch.arange(repeats))


def repeated(pi, repeats):
    return torch.tensor(pi, dtype=torch.float64).expand(repeats, -1)


def test_counts_follow_the_multinomial_law():
    """Chi-square of complete outcomes: m = 3 draws over 3 entries, all ten outcomes."""
    pi, draws, repeats = [0.5, 0.3, 0.2], 3, 20_000
    counts = multinomial_counts(repeated(pi, repeats), torch.full((repeats,), draws), stream_of(repeats))
    outcomes, observed = counts.unique(dim=0, return_counts=True)
    expected = repeats * stats.multinomial(draws, pi).pmf(outcomes.numpy())
    assert len(outcomes) == 10
    assert stats.chisquare(observed.numpy(), expected).pvalue > 1e-4


@pytest.mark.parametrize("draws", [10, 10**6, 10**12, 10**15])
@pytest.mark.parametrize("t", [1, 2, 7, 64, 65])
def test_counts_have_the_right_total_mean_and_variance(t, draws, generator):
    repeats = 4000
    pi = torch.rand(t, dtype=torch.float64, generator=generator) + 0.01
    pi = (pi / pi.sum()).tolist()
    counts = multinomial_counts(repeated(pi, repeats), torch.full((repeats,), draws), stream_of(repeats))
    assert (counts.sum(-1) == draws).all()
    if t == 1:
        return
    for i in (0, t // 2, t - 1):
        variance = draws * pi[i] * (1 - pi[i])
        z = (counts[:, i].double().mean() - draws * pi[i]) / (variance / repeats) ** 0.5
        assert abs(z) < 4.5
        assert counts[:, i].double().var().item() == pytest.approx(variance, rel=0.25)


def test_zero_probability_is_never_drawn():
    pi = repeated([0.0, 0.7, 0.0, 0.3, 0.0], 500)
    counts = multinomial_counts(pi, torch.full((500,), 10**9), stream_of(500))
    assert (counts[:, [0, 2, 4]] == 0).all()
    assert (counts[:, [1, 3]] > 0).all()


@pytest.mark.parametrize("to_left", ["all", "none"])
def test_a_binomial_at_either_end_keeps_empty_entries_empty(to_left):
    """The core takes the binomial as an argument, so its extremes are ordinary tests."""
    pi = torch.tensor([[0.0, 0.4, 0.0, 0.0, 0.6, 0.0]], dtype=torch.float64)
    counts = split_counts(pi, torch.tensor([9]), lambda level, n, p: n if to_left == "all" else torch.zeros_like(n))
    assert counts.sum() == 9
    assert (counts[pi == 0] == 0).all()


def test_a_row_without_weight_draws_nothing():
    counts = multinomial_counts(torch.zeros(1, 4, dtype=torch.float64), torch.tensor([5]), stream_of(1))
    assert counts.tolist() == [[0, 0, 0, 0]]


def test_counts_depend_on_their_streams_alone():
    pi = torch.rand(3, 100, dtype=torch.float64)
    pi /= pi.sum(-1, keepdim=True)
    before = torch.get_rng_state()
    first = multinomial_counts(pi, torch.tensor([50, 50, 50]), stream_of(3))
    again = multinomial_counts(pi, torch.tensor([50, 50, 50]), stream_of(3))
    assert torch.equal(first, again)
    assert torch.equal(before, torch.get_rng_state())


def test_systematic_inclusion_frequencies():
    q = torch.tensor([0.05, 0.9, 1.0, 0.3, 0.0, 0.75, 0.5, 1.0], dtype=torch.float64)
    repeats = 40_000
    kept = systematic_sample(q.expand(repeats, -1), offsets(stream_of(repeats)))
    z = (kept.double().mean(0) - q) / (q * (1 - q) / repeats).sqrt().clamp(min=1e-12)
    assert (z.abs() < 4.5).all()
    assert kept[:, q == 1].all()
    assert not kept[:, q == 0].any()


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=60), st.sampled_from([0.0, 0.5, 1 - 2**-53]) | st.floats(0, 0.999)
)
def test_systematic_sample_size_is_the_total_rounded_down_or_up(q, u):
    q = torch.tensor([q], dtype=torch.float64)
    kept = systematic_sample(q, torch.tensor([u], dtype=torch.float64))
    size, total = int(kept.sum()), float(q.sum())
    assert total - 1 - 1e-9 <= size <= total + 1 + 1e-9
    assert kept[q >= 1].all()
    assert not kept[q == 0].any()


def test_systematic_sample_is_spread_over_the_positions():
    """Equal q: any stretch of positions holds its share, rounded."""
    q = torch.full((200, 100), 0.25, dtype=torch.float64)
    kept = systematic_sample(q, offsets(stream_of(200)))
    per_stretch = kept.view(200, 5, 20).sum(-1)
    assert (per_stretch == 5).all()


def test_systematic_extremes_of_the_offset():
    q = torch.full((1, 4), 0.5, dtype=torch.float64)
    assert systematic_sample(q, torch.zeros(1).double()).tolist() == [[False, True, False, True]]
    last = torch.tensor([1 - 1e-12], dtype=torch.float64)
    assert systematic_sample(q, last).tolist() == [[True, False, True, False]]
