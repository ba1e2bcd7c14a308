"""Sequential importance resampling: its law over several rounds, its budget, its edge cases."""

import pytest
import torch

from kvpress_prob.maths.draw import DrawSettings
from kvpress_prob.maths.random import streams
from kvpress_prob.maths.resampling import resample

KINDS = [("systematic", "inclusion"), ("multinomial", "inclusion"), ("multinomial", "counts")]


def one(log_w, weights, take_all, keep, seed=0, sampler="systematic", correction="inclusion", temperature=1.0):
    return resample(
        log_w,
        weights,
        take_all,
        keep=keep,
        settings=DrawSettings(sampler, correction, temperature),
        stream=streams(seed, torch.arange(len(weights))),
    )


@pytest.mark.parametrize(("sampler", "correction"), KINDS)
def test_weights_are_unbiased_after_every_round(sampler, correction):
    """``E[w' 1(kept)] = w`` for each entry; three rounds, in each of which proposals follow the current weights. Heads
    are the replicates."""
    h, t, runs = 1000, 40, 4
    generator = torch.Generator().manual_seed(0)
    score = (0.1 + torch.rand(t, dtype=torch.float64, generator=generator)).expand(h, t)
    take_all = torch.zeros(h, t, dtype=torch.bool)
    take_all[:, -3:] = True
    rounds = [[], [], []]
    for run in range(runs):
        held, log_w = torch.ones(h, t, dtype=torch.bool), torch.zeros(h, t)
        for keep, weights_of_round in zip((25, 18, 12), rounds, strict=True):
            weights = torch.where(held & ~take_all, score * log_w.double().exp(), 0)
            kept, log_w = one(log_w, weights, take_all, keep, run * 100 + keep, sampler, correction)
            assert not (kept & ~held).any()
            held = kept
            weights_of_round.append(torch.where(held, log_w.double().exp(), 0))
    for weights_of_round in rounds:
        w = torch.cat(weights_of_round)  # [runs * h t]
        error = w.std(0) / len(w) ** 0.5
        certain = error == 0
        assert certain[-3:].all()
        assert (w[:, certain] == 1).all()
        z = (w.mean(0) - 1)[~certain] / error[~certain]
        assert z.abs().max() < 4, z.abs().max()


@pytest.mark.parametrize(("sampler", "correction"), KINDS)
def test_the_heads_share_the_budget(sampler, correction, generator):
    score = torch.rand(3, 200, dtype=torch.float64, generator=generator) ** 3
    take_all = torch.zeros(3, 200, dtype=torch.bool)
    take_all[:, :2] = take_all[:, -5:] = True
    weights = torch.where(take_all, 0, score)
    kept, _ = one(torch.zeros(3, 200), weights, take_all, 60, 0, sampler, correction)
    assert kept[take_all].all()
    slack = 3 if sampler == "systematic" else 40
    assert abs(int(kept.sum()) - 180) <= slack


def test_certain_entries_keep_their_weight():
    log_w = torch.randn(2, 30)
    take_all = torch.zeros(2, 30, dtype=torch.bool)
    take_all[:, 20:] = True
    kept, new = one(log_w, torch.where(take_all, 0.0, 1.0).double(), take_all, 15)
    assert torch.equal(new[take_all], log_w[take_all])
    drawn = kept & ~take_all
    torch.testing.assert_close(new[drawn], log_w[drawn] + torch.tensor(4.0).log())  # 5 of 20 are kept


def test_a_budget_beyond_the_support_keeps_it_whole():
    log_w = torch.randn(1, 10)
    weights = torch.ones(1, 10, dtype=torch.float64)
    weights[0, 3] = 0  # an empty place
    kept, new = one(log_w, weights, torch.zeros(1, 10, dtype=torch.bool), 10)
    assert torch.equal(kept, weights > 0)
    assert torch.equal(new, torch.where(kept, log_w, 0))


def test_the_temperature_tempers_the_new_weight_only():
    log_w = torch.full((1, 100), 2.0)
    weights = torch.ones(1, 100, dtype=torch.float64)
    kept, new = one(log_w, weights, torch.zeros(1, 100, dtype=torch.bool), 25, temperature=2.0)
    torch.testing.assert_close(new[kept], torch.full((int(kept.sum()),), 2.0) + torch.tensor(4.0).log() / 2)
