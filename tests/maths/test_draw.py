"""The one call: budgets, the take-all stratum, allocation, determinism and the ends of every switch."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.maths.budget import solve_inclusion
from kvpress_prob.maths.draw import ALLOCATIONS, DrawSettings, Proposal, draw, groups_of
from kvpress_prob.maths.random import streams

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
        stream=streams(kwargs.pop("seed", 0), torch.arange(heads)),
        settings=DrawSettings(sampler, correction, **kwargs),
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


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": "poisson"}, "sampler must be one of .*, got 'poisson'"),
        ({"correction": 1}, "correction must be one of .*, got 1"),
        ({"allocation": "model"}, "allocation must be one of .*, got 'model'"),
        ({"correction": "counts"}, "correction='counts' needs sampler='multinomial', got sampler='systematic'"),
        ({"temperature": 0}, "temperature must be a number > 0, got 0"),
        ({"temperature": True}, "temperature must be a number > 0, got True"),
        ({"temperature": math.nan}, "temperature must be a number > 0, got nan"),
        ({"max_weight": 0.5}, "max_weight must be a number >= 1, got 0.5"),
        ({"uniform_mix": 1.5}, r"uniform_mix must be a number in \[0, 1\], got 1.5"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DrawSettings(**settings)
    assert DrawSettings(temperature=np.float32(2), uniform_mix=np.float64(0.5)).temperature == 2


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
    first = take(weights, seed=5)
    again = take(weights, seed=5)
    other = take(weights, seed=6)
    assert torch.equal(first.kept, again.kept)
    assert not torch.equal(first.kept, other.kept)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_head_is_drawn_as_it_would_be_alone(sampler, generator):
    """With a budget of its own, a head's draw knows nothing of the heads beside it nor of their order."""
    weights = weights_of(generator)
    stream = streams(3, torch.arange(HEADS))

    def drawn(heads):
        return draw(
            [Proposal(weights[heads])],
            torch.zeros(len(heads), T, dtype=torch.bool),
            torch.arange(len(heads)),
            keep_fraction=0.4,
            settings=DrawSettings(sampler),
            stream=stream[heads],
        )

    together = drawn(torch.arange(HEADS))
    for heads in (torch.tensor([4]), torch.tensor([5, 0, 2])):
        apart = drawn(heads)
        assert torch.equal(apart.kept, together.kept[heads])
        assert torch.equal(apart.log_w, together.log_w[heads])


@given(st.integers(1, 8), st.floats(0.01, 1.0), st.sampled_from(SAMPLERS), st.integers(0, 5))
def test_tiny_contexts_keep_at_least_one_entry_a_head(t, keep, sampler, seed):
    """Scenario S1."""
    weights = torch.rand(4, t, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    result = take(weights, keep=keep, sampler=sampler)
    assert (result.kept.sum(-1) >= 1).all()
    assert torch.isfinite(result.log_w).all()


def two(generator, share=0.3):
    """A proposal that normalises its heads and one with raw, sharp weights."""
    return [
        Proposal(weights_of(generator), 1 - share),
        Proposal(weights_of(generator) ** 4 * torch.arange(1, HEADS + 1).unsqueeze(-1), share, "score"),
    ]


def mixed(proposals, *, keep=0.4, heads=HEADS, **kwargs):
    return draw(
        proposals,
        torch.zeros(heads, proposals[0].weights.shape[1], dtype=torch.bool),
        torch.zeros(heads, dtype=torch.int64),
        keep_fraction=keep,
        stream=streams(0, torch.arange(heads)),
        settings=DrawSettings(**kwargs),
    )


@pytest.mark.parametrize("keep", [0.05, 0.4, 0.9])
@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_a_union_is_two_independent_draws_with_an_exact_total(keep, share, generator):
    """q = 1 - (1 - c q1)(1 - c q2) with q1, q2 solved alone for their shares, and c >= 1 for the total."""
    proposals = two(generator, share)
    result = mixed(proposals, keep=keep)
    total = keep * HEADS * T
    assert float(result.probability.sum()) == pytest.approx(total, rel=1e-9)
    group, none = torch.zeros(HEADS, dtype=torch.int64), torch.zeros(HEADS).double()
    pi = proposals[0].weights / proposals[0].weights.sum(-1, keepdim=True)
    alone = [
        solve_inclusion(amounts, group, torch.tensor([part * total]), none)
        for amounts, part in ((pi, 1 - share), (proposals[1].weights, share))
    ]
    low, high = 1.0, 1e6
    for _ in range(200):
        c = (low + high) / 2
        union = 1 - (1 - (c * alone[0]).clamp(max=1)) * (1 - (c * alone[1]).clamp(max=1))
        low, high = (c, high) if union.sum() < total else (low, c)
    torch.testing.assert_close(result.probability, union, atol=1e-6, rtol=1e-6)
    assert (result.kept.sum(-1) >= 1).all()


def test_a_union_leaves_no_head_empty(generator):
    proposals = two(generator, 0.999)
    proposals[1].weights[:5] *= 1e-12
    result = mixed(proposals, keep=0.1)
    totals = result.probability.sum(-1)
    assert (totals >= 1 - 1e-9).all()
    assert float(totals.min()) == pytest.approx(1)
    assert float(totals.sum()) == pytest.approx(0.1 * HEADS * T, rel=1e-9)
    assert (result.kept.sum(-1) >= 1).all()


def test_the_union_keeps_every_certain_entry_of_its_parts(generator):
    proposals = two(generator, 0.5)
    result = mixed(proposals)
    certain = (
        solve_inclusion(
            proposals[1].weights,
            torch.zeros(HEADS, dtype=torch.int64),
            torch.tensor([0.2 * HEADS * T]),
            torch.zeros(HEADS),
        )
        == 1
    )
    assert certain.any()
    assert result.kept[certain].all()
    assert (result.log_w[certain] == 0).all()


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_inclusion_frequencies_of_combined_proposals(sampler, generator):
    """What is drawn is drawn as often as ``probability`` says, and the weighted mass is unbiased."""
    repeats, t = 4000, 40
    a, b = (torch.rand(t, dtype=torch.float64, generator=generator) ** power + 1e-3 for power in (1, 5))
    proposals = [Proposal(a.expand(repeats, -1), 0.6), Proposal(b.expand(repeats, -1), 0.4, "score")]
    f = torch.rand(t, dtype=torch.float64, generator=generator)
    result = mixed(proposals, heads=repeats, sampler=sampler)
    q = result.probability[0]
    z = (result.kept.double().mean(0) - q) / (q * (1 - q) / repeats).sqrt().clamp(min=1e-12)
    assert z[q < 1].abs().max() < 4.5
    mass = (result.kept * result.log_w.double().exp() * f).sum(-1)
    assert abs(float((mass.mean() - f.sum()) / (mass.std() / repeats**0.5))) < 4.5


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize("budget_weighting", ["uniform", "score"])
def test_top_k_keeps_the_largest_amounts(allocation, budget_weighting, generator):
    weights = weights_of(generator) * torch.arange(1, HEADS + 1).unsqueeze(-1)
    group = groups_of(allocation, torch.tensor([0, 0, 1, 1, 2, 2]))
    result = take(weights, group=group, keep=0.3, sampler="top_k", correction="none", budget_weighting=budget_weighting)
    amounts = weights / weights.sum(-1, keepdim=True) if budget_weighting == "uniform" else weights
    for index in group.unique():
        heads = group == index
        assert int(result.kept[heads].sum()) == round(0.3 * T * int(heads.sum()))
        assert amounts[heads][result.kept[heads]].min() > amounts[heads][~result.kept[heads]].max()
    assert (result.log_w == 0).all()


def test_top_k_leaves_no_head_empty_and_keeps_no_impossible_entry(generator):
    weights = weights_of(generator)
    weights[0] *= 1e-9
    weights[1, 5:] = 0
    result = take(weights, keep=0.05, sampler="top_k", correction="none", budget_weighting="score")
    assert int(result.kept[0].sum()) == 1
    assert int(result.kept.sum()) == round(0.05 * T * HEADS)
    everything = take(weights, keep=1.0, sampler="top_k", correction="none")
    assert torch.equal(everything.kept, weights > 0)


def test_top_k_takes_no_correction_and_one_proposal(generator):
    with pytest.raises(ValueError, match="sampler='top_k' needs correction='none', got correction='inclusion'"):
        take(weights_of(generator), sampler="top_k")
    with pytest.raises(ValueError, match="sampler='top_k' draws nothing and takes one proposal, got 2"):
        mixed(two(generator), sampler="top_k", correction="none")


def test_a_largest_weight_is_kept_to(generator):
    free = take(weights_of(generator), keep=0.1)
    assert free.log_w.exp().max() > 4
    capped = take(weights_of(torch.Generator().manual_seed(0)), keep=0.1, max_weight=4.0)
    assert capped.log_w.exp().max() <= 4.0001


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
    result = take(weights, keep=keep, sampler=sampler, seed=seed)
    wanted, slack = max(keep * t, 1) * heads, heads
    if sampler == "multinomial":
        slack = 5 * (heads * t * keep * (1 - keep)) ** 0.5 + heads
    assert abs(int(result.kept.sum()) - wanted) <= slack + 1e-6
