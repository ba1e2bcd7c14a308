"""The one call: budgets, the take-all stratum, allocation, determinism and the ends of every switch."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.maths.draw import ALLOCATIONS, Proposal, draw, groups_of

HEADS, T = 6, 120
SAMPLERS = ("systematic", "multinomial")


def weights_of(generator, heads=HEADS, t=T):
    return torch.rand(heads, t, dtype=torch.float64, generator=generator) ** 3


def take(weights, take_all=None, group=None, *, keep=0.5, sampler="systematic", correction="inclusion", **kwargs):
    heads, t = weights.shape
    budget_weighting = kwargs.pop("budget_weighting", "uniform")
    return draw(
        [Proposal(weights, budget_weighting=budget_weighting)],
        torch.zeros(heads, t, dtype=torch.bool) if take_all is None else take_all,
        torch.zeros(heads, dtype=torch.int64) if group is None else group,
        keep_fraction=keep,
        sampler=sampler,
        correction=correction,
        temperature=kwargs.pop("temperature", 1.0),
        generator=kwargs.pop("generator", torch.Generator().manual_seed(0)),
    )


@pytest.mark.parametrize("keep", [0.01, 0.1, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_systematic_hits_every_budget_within_one_entry_a_head(keep, allocation, generator):
    weights = weights_of(generator)
    group = groups_of(allocation, torch.tensor([0, 0, 1, 1, 2, 2]))
    result = take(weights, group=group, keep=keep)
    for index in group.unique():
        heads = group == index
        want = max(keep * T * int(heads.sum()), int(heads.sum()))
        assert abs(int(result.kept[heads].sum()) - want) <= int(heads.sum())
    assert (result.kept.sum(-1) >= 1).all()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_take_all_entries_are_kept_with_weight_one_and_count_towards_the_budget(sampler, generator):
    weights = weights_of(generator)
    take_all = torch.zeros(HEADS, T, dtype=torch.bool)
    take_all[:, -20:] = True
    weights[take_all] = 0
    result = take(weights, take_all, keep=0.5, sampler=sampler)
    assert result.kept[:, -20:].all()
    assert (result.log_w[:, -20:] == 0).all()
    assert (result.probability[take_all] == 1).all()
    assert abs(int(result.kept.sum()) - HEADS * T // 2) <= 4 * HEADS


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_budget_spent_on_the_take_all_stratum_draws_nothing_more(sampler, generator):
    weights = weights_of(generator)
    take_all = torch.zeros(HEADS, T, dtype=torch.bool)
    take_all[:, :80] = True
    weights[take_all] = 0
    result = take(weights, take_all, keep=0.5, sampler=sampler)
    assert torch.equal(result.kept, take_all)


@pytest.mark.parametrize(("sampler", "correction"), [("systematic", "inclusion"), ("multinomial", "counts")])
def test_a_budget_of_everything_keeps_the_support_with_weight_one(sampler, correction, generator):
    weights = weights_of(generator)
    weights[:, :30] = 0
    result = take(weights, keep=0.9, sampler=sampler, correction=correction)
    assert torch.equal(result.kept, weights > 0)
    assert (result.log_w == 0).all()


def test_counts_need_the_multinomial_sampler(generator):
    with pytest.raises(ValueError, match="correction='counts' needs sampler='multinomial'"):
        take(weights_of(generator), correction="counts")


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_score_weighting_gives_more_to_heads_with_larger_totals(sampler, generator):
    weights = torch.rand(2, T, dtype=torch.float64, generator=generator)
    weights[1] *= 5
    uniform = take(weights, keep=0.3, sampler=sampler).kept.sum(-1)
    score = take(weights, keep=0.3, sampler=sampler, budget_weighting="score").kept.sum(-1)
    assert abs(int(uniform[0] - uniform[1])) < 12
    assert score[1] > 2.5 * score[0]


def test_score_weighting_is_one_lambda_over_raw_scores(generator):
    weights = weights_of(generator) * torch.rand(HEADS, 1, dtype=torch.float64, generator=generator)
    result = take(weights, keep=0.3, budget_weighting="score")
    inside = (result.probability < 1) & (result.probability.sum(-1, keepdim=True) > 1.001)
    scale = (result.probability / weights)[inside]
    torch.testing.assert_close(scale, scale[:1].expand_as(scale))


def test_none_leaves_every_weight_at_one(generator):
    assert (take(weights_of(generator), correction="none").log_w == 0).all()


def test_same_seed_same_draw_other_seed_other_draw(generator):
    weights = weights_of(generator)
    first = take(weights, generator=torch.Generator().manual_seed(5))
    again = take(weights, generator=torch.Generator().manual_seed(5))
    other = take(weights, generator=torch.Generator().manual_seed(6))
    assert torch.equal(first.kept, again.kept)
    assert not torch.equal(first.kept, other.kept)


@given(st.integers(1, 8), st.floats(0.01, 1.0), st.sampled_from(SAMPLERS), st.integers(0, 5))
def test_tiny_contexts_keep_at_least_one_entry_a_head(t, keep, sampler, seed):
    """Scenario S1."""
    weights = torch.rand(4, t, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    result = take(weights, keep=keep, sampler=sampler)
    assert (result.kept.sum(-1) >= 1).all()
    assert torch.isfinite(result.log_w).all()


@given(
    st.integers(1, 6),
    st.integers(1, 120),
    st.floats(0.01, 0.99),
    st.sampled_from(SAMPLERS),
    st.sampled_from([0.1, 1.0, 8.0]),
    st.integers(0, 99),
)
def test_the_size_of_a_draw_is_bounded(heads, t, keep, sampler, sharpness, seed):
    """Scenario S4: systematic is within one entry a head of what can be met; the multinomial's size has at most the
    binomial's deviation around it (five of them here), and half an entry a head for whole numbers of draws."""
    weights = torch.rand(heads, t, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) ** sharpness
    result = take(weights, keep=keep, sampler=sampler, generator=torch.Generator().manual_seed(seed))
    wanted, slack = max(keep * t, 1) * heads, heads
    if sampler == "multinomial":
        slack = 5 * (heads * t * keep * (1 - keep)) ** 0.5 + heads
    assert abs(int(result.kept.sum()) - wanted) <= slack + 1e-6
