"""Proposals: equations against loops, the take-all stratum against kvpress' scorers, the rule for any scorer's
scores."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvpress_prob.maths.proposals import (
    SCORES_ARE,
    accumulated_attention_proposal,
    check_finite,
    log_proposal,
    min_variance_proposal,
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


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class TestTakeAllStratum:
    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.parametrize("heads", [1, 2, 8])
    def test_maximum_plus_one_in_every_head(self, dtype, heads):
        scores = torch.rand(heads, 20).to(dtype) * 0.01
        padded = torch.nn.functional.pad(scores, (0, 4), value=scores.max().item() + 1)
        got = take_all_stratum(padded)
        assert got[..., 20:].all()
        assert not got[..., :20].any()

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_the_largest_number_wherever_it_stands_and_one_plateau_only(self, dtype):
        scores = torch.rand(2, 20).to(dtype) * 0.01
        scores[:, 3] = scores.max().item() + 1
        scores[0, 5] = scores[1, 7] = torch.finfo(dtype).max
        assert take_all_stratum(scores).nonzero().tolist() == [[0, 5], [1, 7]]

    @pytest.mark.parametrize(
        "scores",
        [
            torch.rand(2, 40),
            torch.randn(2, 40),
            torch.ones(2, 40),
            torch.zeros(2, 40),
            torch.arange(40.0).expand(2, -1),
            torch.arange(40).expand(2, -1),
            torch.arange(40.0).expand(2, -1) + 0.5,
            torch.arange(40.0).expand(2, -1) / 40,
            -torch.arange(40.0).expand(2, -1),
            torch.randint(8, (2, 40)),
            torch.randint(8, (2, 40)).float(),
            torch.randint(2, (2, 40)).bool(),
            torch.eye(40)[:1].expand(2, -1),
            torch.tensor([[0.0, 1, 2] * 13]),
            torch.tensor([[0.3, 0.3, 1.3]]),
            torch.tensor([[0.1, 0.2, 1.2, 1.2], [0.1, 1.2, 0.2, 0.1]]),
        ],
    )
    @pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float64])
    def test_ordinary_scores_have_none(self, scores, dtype):
        """Scenario S34: ranks, counts, integers, constants, one-hot scores; places that differ between heads."""
        assert not take_all_stratum(scores if dtype is None else scores.to(dtype)).any()


def weights(scores, scores_are="weights", valid=None, **settings):
    log_a = log_proposal(scores, everything(scores) if valid is None else valid, scores_are, **settings)
    return log_a.exp()


class TestLogProposal:
    def test_weights_stay(self):
        torch.testing.assert_close(weights(torch.tensor([[0.0, 1, 3]])), torch.tensor([[0.0, 1, 3]]).double())

    def test_temperature_is_a_power_of_weights(self):
        got = weights(torch.tensor([[0.0, 1, 3]]), temperature=0.5)
        torch.testing.assert_close(got, torch.tensor([[0.0, 1, 9]], dtype=torch.float64))

    def test_log_weights_are_logarithms_of_weights(self):
        scores = torch.rand(2, 30) + 0.01
        for temperature in (0.3, 1.0, 4.0):
            torch.testing.assert_close(
                weights(scores.double().log(), "log_weights", temperature=temperature),
                weights(scores, temperature=temperature),
            )

    def test_an_infinite_temperature_draws_alike_from_what_has_a_weight(self):
        got = weights(torch.tensor([[0.0, 1, 3]]), temperature=float("inf"))
        torch.testing.assert_close(got, torch.tensor([[0.0, 1, 1]], dtype=torch.float64))

    def test_logits_go_through_softmax(self):
        scores = torch.tensor([[-1.0, 0, 2]])
        got = weights(scores, "logits", temperature=2.0)
        torch.testing.assert_close(got, torch.softmax(scores.double() / 2, -1))

    def test_undeclared_scores_are_read_head_by_head(self):
        """Scenario S36: a head's own scores decide; rounding below 0 does not."""
        scores = torch.rand(4, 50)
        plain = weights(scores, None)
        torch.testing.assert_close(plain, weights(scores))
        scores[1, 7], scores[2, 3] = -1e-7, -0.5
        got = weights(scores, None)
        assert torch.equal(got[[0, 3]], plain[[0, 3]])
        torch.testing.assert_close(got[1], scores[1].double().clamp(min=0))
        torch.testing.assert_close(got[2], torch.softmax(scores[2].double(), -1))

    @pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, *FLOATS])
    @pytest.mark.parametrize("scores_are", [None, *SCORES_ARE])
    def test_any_real_dtype(self, dtype, scores_are):
        """Scenario S34."""
        scores = torch.randint(5, (2, 30)).to(dtype)
        got = log_proposal(scores, everything(scores), scores_are, temperature=2.0)
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, log_proposal(scores.double(), everything(scores), scores_are, temperature=2.0))

    @pytest.mark.parametrize("scores_are", [None, *SCORES_ARE])
    @pytest.mark.parametrize("temperature", [0.005, 0.001, 1e-4, 100.0])
    def test_sharp_and_flat_temperatures(self, scores_are, temperature):
        """Scenario S35: nothing underflows or overflows, ratios of weights are exact."""
        scores = torch.rand(3, 40, dtype=torch.float64) * torch.tensor([[1e-30], [1.0], [1e30]]).double()
        scores = scores.log() if scores_are == "log_weights" else scores
        got = log_proposal(scores, everything(scores), scores_are, temperature=temperature)
        assert got.isfinite().all()
        want = (scores if scores_are in ("log_weights", "logits") else scores.log()) / temperature
        torch.testing.assert_close(got - got[:, :1], want - want[:, :1], atol=1e-6, rtol=1e-9)

    @pytest.mark.parametrize("scores_are", [None, "weights"])
    @pytest.mark.parametrize("scores", [torch.zeros(1, 4), torch.full((1, 4), -1e-30), torch.zeros(1, 4).long()])
    def test_a_head_without_weight_is_uniform_over_what_may_be_drawn(self, scores, scores_are):
        valid = torch.tensor([[False, True, True, True]])
        got = log_proposal(scores, valid, scores_are)
        assert got[0, 0] == -torch.inf
        torch.testing.assert_close(got[0, 1:].softmax(-1), torch.full((3,), 1 / 3).double())

    def test_a_head_without_weight_comes_after_all_others(self):
        """Whatever its scores' scale, heads that compete do not give way to it."""
        got = log_proposal(torch.tensor([[0.0, 0, 0], [1e-40, 1e-45, 1e-30]]), torch.ones(2, 3).bool(), "weights")
        assert got[0].max() < got[1].min()

    @pytest.mark.parametrize("mix", [0.1, 0.9, 1.0])
    def test_uniform_mixing_keeps_the_total(self, mix):
        got = weights(torch.tensor([[0.0, 1, 3, 0]]), uniform_mix=mix)
        want = torch.tensor([[0.0, 1, 3, 0]], dtype=torch.float64) * (1 - mix) + mix
        torch.testing.assert_close(got, want)

    @pytest.mark.parametrize(("bad", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
    def test_refuses_scores_that_are_not_finite(self, bad, word):
        with pytest.raises(ValueError, match=f"scores of layer 3 must be finite, got {word}"):
            check_finite("scores of layer 3", torch.tensor([[0.0, bad]]))

    @given(
        st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=30),
        st.floats(1e-3, 10),
        st.floats(0, 1),
        st.sampled_from([None, *SCORES_ARE]),
    )
    def test_some_entry_can_always_be_drawn(self, scores, temperature, mix, scores_are):
        scores = torch.tensor([scores])
        got = log_proposal(scores, everything(scores), scores_are, temperature=temperature, uniform_mix=mix)
        assert not got.isnan().any()
        assert (got > -torch.inf).any()
        if mix:
            assert (got > -torch.inf).all()
