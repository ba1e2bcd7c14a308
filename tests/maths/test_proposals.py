"""Proposals: equations against loops, the take-all stratum against kvpress' scorers, the rule for any scorer's
scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.maths.proposals import (
    accumulated_attention_proposal,
    min_variance_proposal,
    proposal_weights,
    row_prior,
    take_all_stratum,
)


def everything(scores):
    return torch.ones_like(scores, dtype=torch.bool)


@pytest.mark.parametrize(
    ("prior", "want"), [("last", [0, 0, 0, 1]), ("uniform", [0.25] * 4), ("harmonic", [0.12, 0.16, 0.24, 0.48])]
)
def test_row_prior(prior, want):
    got = row_prior(prior, torch.ones(1, 4, dtype=torch.bool))
    torch.testing.assert_close(got, torch.tensor([want], dtype=torch.float64))


def test_row_prior_of_a_padded_row_is_that_of_the_shorter_one():
    valid = torch.tensor([[False, False, True, True, True]])
    got = row_prior("harmonic", valid)
    assert got[0, :2].tolist() == [0, 0]
    torch.testing.assert_close(got[:, 2:], row_prior("harmonic", torch.ones(1, 3, dtype=torch.bool)))


def test_row_prior_refuses_an_unknown_name():
    with pytest.raises(ValueError, match=r"prior must be one of .*got 'newest'"):
        row_prior("newest", torch.ones(1, 4, dtype=torch.bool))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("group", [1, 3])
def test_min_variance_proposal_is_its_equation(centered, group):
    b, hkv, t, dv = 2, 2, 7, 5
    mass = torch.rand(b, hkv * group, t, dtype=torch.float64)
    mass /= mass.sum(-1, keepdim=True)
    values = torch.randn(b, hkv, t, dv, dtype=torch.float64)
    got = min_variance_proposal(mass, values, centered=centered)
    for row in range(b):
        for head in range(hkv):
            mixture = torch.zeros(t, dtype=torch.float64)
            for member in range(group):
                pbar = mass[row, head * group + member]
                centre = pbar @ values[row, head] if centered else torch.zeros(dv)
                pi = torch.stack([pbar[i] * (values[row, head, i] - centre).norm() for i in range(t)])
                mixture += pi / pi.sum() / group
            torch.testing.assert_close(got[row, head], mixture)


def test_min_variance_proposal_minimises_the_variance(generator):
    """E|(v_I - o) p_I / pi_I|^2 = sum_i p_i^2 |v_i - o|^2 / pi_i, smallest at pi proportional to p |v - o| (Owen,
    section 9.2)."""
    t = 50
    p = torch.rand(1, 1, t, dtype=torch.float64, generator=generator)
    p /= p.sum()
    values = torch.randn(1, 1, t, 4, dtype=torch.float64, generator=generator)
    o = p @ values

    def variance(pi):
        return (p**2 * (values - o.unsqueeze(2)).square().sum(-1).view(1, 1, t) / pi).sum()

    best = min_variance_proposal(p, values, centered=True)
    least = variance(best)
    assert least < variance(min_variance_proposal(p, values, centered=False))
    for _ in range(20):
        other = best * torch.rand(1, 1, t, dtype=torch.float64, generator=generator)
        assert least < variance(other / other.sum())


def test_group_mixture_covers_every_members_support():
    mass = torch.tensor([[[1.0, 0, 0, 0], [0, 0, 0.5, 0.5]]])
    got = accumulated_attention_proposal(mass, kv_heads=1)
    torch.testing.assert_close(got, torch.tensor([[[0.5, 0, 0.25, 0.25]]]))


class TestTakeAllStratum:
    def test_plain_scores_have_none(self):
        assert not take_all_stratum(torch.rand(2, 3, 10)).any()

    def test_equal_scores_have_none(self):
        assert not take_all_stratum(torch.ones(2, 3, 10)).any()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_maximum_plus_one(self, dtype):
        scores = torch.rand(1, 2, 20).to(dtype) * 0.01
        padded = torch.nn.functional.pad(scores, (0, 4), value=scores.max().item() + 1)
        got = take_all_stratum(padded)
        assert got[..., 20:].all()
        assert not got[..., :20].any()

    def test_largest_number_over_maximum_plus_one(self):
        scores = torch.rand(1, 1, 20)
        scores[..., 3] = scores.max().item() + 1
        scores[..., 5] = torch.finfo(scores.dtype).max
        assert take_all_stratum(scores).nonzero()[:, -1].tolist() == [3, 5]

    def test_zeros_and_ones(self):
        scores = torch.zeros(1, 1, 8)
        scores[..., :3] = 1
        assert take_all_stratum(scores).sum() == 3


class TestProposalWeights:
    def test_non_negative_scores_stay(self):
        scores = torch.tensor([[0.0, 1, 3]])
        assert proposal_weights(scores, everything(scores)).tolist() == [[0, 1, 3]]

    def test_temperature_is_a_power_of_non_negative_scores(self):
        scores = torch.tensor([[0.0, 1, 3]])
        got = proposal_weights(scores, everything(scores), temperature=0.5)
        torch.testing.assert_close(got, torch.tensor([[0.0, 1, 9]], dtype=torch.float64))

    def test_negative_scores_go_through_softmax(self):
        scores = torch.tensor([[-1.0, 0, 2]])
        got = proposal_weights(scores, everything(scores), temperature=2.0)
        torch.testing.assert_close(got, torch.softmax(scores.double() / 2, -1))

    def test_all_zero_becomes_uniform_over_the_valid_entries(self):
        scores = torch.zeros(1, 4)
        valid = torch.tensor([[False, True, True, True]])
        torch.testing.assert_close(proposal_weights(scores, valid)[0, 1:].sum(), torch.tensor(1.0).double())
        assert proposal_weights(scores, valid)[0, 0] == 0

    def test_uniform_mixing_keeps_the_total(self):
        scores = torch.tensor([[0.0, 1, 3, 0]])
        got = proposal_weights(scores, everything(scores), uniform_mix=0.1)
        torch.testing.assert_close(got, torch.tensor([[0.1, 1.0, 2.8, 0.1]], dtype=torch.float64))

    @pytest.mark.parametrize(("bad", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
    def test_refuses_scores_that_are_not_finite(self, bad, word):
        scores = torch.tensor([[0.0, bad]])
        with pytest.raises(ValueError, match=f"scores of layer 3 must be finite, got {word}"):
            proposal_weights(scores, everything(scores), name="scores of layer 3")

    def test_refuses_an_overflowing_power(self):
        scores = torch.tensor([[1e30, 1]])
        with pytest.raises(ValueError, match="overflows"):
            proposal_weights(scores, everything(scores), temperature=0.01)

    @given(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30),
        st.floats(0.2, 10),
        st.floats(0, 1),
    )
    def test_weights_are_finite_and_never_all_zero(self, scores, temperature, mix):
        scores = torch.tensor([scores])
        got = proposal_weights(scores, everything(scores), temperature=temperature, uniform_mix=mix)
        assert torch.isfinite(got).all()
        assert (got >= 0).all()
        assert got.sum() > 0
