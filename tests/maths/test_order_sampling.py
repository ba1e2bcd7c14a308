"""Priority samples: their size, their law, and that it does not matter how a stream is cut."""

import math

import pytest
import torch

from kvpress_prob.maths.order_sampling import largest, log_inclusion, log_priorities, log_totals, share_scales
from kvpress_prob.maths.random import uniforms


def random_numbers(components, runs, n):
    """log u [k runs n]: a seed's numbers in every run."""
    return uniforms(0, torch.arange(components).view(-1, 1, 1), torch.arange(runs).unsqueeze(-1), torch.arange(n)).log()


def sample(log_amounts, log_u, capacity, piece):
    """Log-weights [runs n] of each run's sample of a stream that is read in pieces, -inf for what was evicted, which is
    never looked at again."""
    _, runs, n = log_u.shape
    amounts, log_u = log_amounts.unsqueeze(1).expand_as(log_u).flatten(1), log_u.flatten(1)
    held = torch.zeros(runs * n, dtype=torch.bool)
    place, run = torch.arange(runs * n) % n, torch.arange(runs * n) // n
    tau = torch.full((runs,), -torch.inf, dtype=torch.float64)
    for begin in range(0, n, piece):
        held |= (place >= begin) & (place < begin + piece)
        here = held.nonzero().squeeze(-1)
        here = here[log_priorities(amounts[:, here], log_u[:, here]) > tau[run[here]]]
        priority = log_priorities(amounts[:, here], log_u[:, here])
        kept, cut = largest(priority, run[here], torch.full((runs,), capacity))
        held[:] = False
        held[here[kept]] = True
        tau = torch.maximum(tau, cut)
    log_w = torch.where(held, -log_inclusion(amounts - tau[run]), -torch.inf)
    return log_w.view(runs, n)


@pytest.mark.parametrize("components", [1, 2])
def test_pieces_of_any_size_give_the_same_sample_and_weights_to_the_bit(components):
    generator = torch.Generator().manual_seed(3)
    amounts = 2 * torch.randn(components, 700, generator=generator, dtype=torch.float64)
    log_u = random_numbers(components, 2, 700)
    want = sample(amounts, log_u, 60, 700)
    assert (want > -torch.inf).sum(-1).tolist() == [60, 60]
    for piece in (1, 7, 64, 300):
        assert torch.equal(sample(amounts, log_u, 60, piece), want)


@pytest.mark.parametrize("components", [1, 2])
def test_weights_are_one_on_average_for_every_entry(components):
    """Entry by entry over 4,000 runs, and the total of something that has nothing to do with the amounts."""
    n, runs = 40, 4000
    generator = torch.Generator().manual_seed(0)
    amounts = torch.randn(components, n, generator=generator, dtype=torch.float64)
    values = torch.randn(n, generator=generator, dtype=torch.float64) + 2
    log_w = sample(amounts, random_numbers(components, runs, n), 12, 5)
    weights = log_w.exp()
    assert ((log_w > -torch.inf).sum(-1) == 12).all()
    z = (weights.mean(0) - 1) / (weights.std(0) / runs**0.5)
    assert z.abs().max() < 4, z
    totals = weights @ values
    assert abs(totals.mean() - values.sum()) < 4 * totals.std() / runs**0.5
    assert totals.std() > 0.05 * values.sum(), "nothing was left to chance"


def test_amounts_that_change_from_round_to_round():
    """Every round the amounts are new and depend on what is held: weights stay one on average."""
    n, runs, capacity = 36, 4000, 10
    base = 0.5 * torch.randn(3, n, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    log_u = random_numbers(1, runs, n)[0]
    log_q = torch.zeros_like(log_u)
    held = torch.zeros(runs, n, dtype=torch.bool)
    run = torch.arange(runs).unsqueeze(-1).expand(runs, n)
    for round_, begin in enumerate(range(0, n, 12)):
        held[:, begin : begin + 12] = True
        amounts = base[round_] + 0.5 * (held * base[0]).sum(-1, keepdim=True).sign() * base[1]
        priority = log_priorities(amounts[held].unsqueeze(0), log_u[held].unsqueeze(0), (log_u < log_q)[held])
        kept, tau = largest(priority, run[held], torch.full((runs,), capacity))
        log_q = torch.where(held, torch.minimum(log_q, amounts - tau.unsqueeze(-1)), log_q)
        held[held.clone()] = kept
        assert (held.sum(-1) == capacity).all()
    weights = torch.where(held, -log_q, -torch.inf).exp()
    assert weights.std(0).min() > 0.3, "some entry was never left to chance"
    z = (weights.mean(0) - 1) / (weights.std(0) / runs**0.5)
    assert z.abs().max() < 4, z


def test_the_largest_of_every_group():
    priority = torch.tensor([5.0, 1, 3, 3, 2, 9, -math.inf], dtype=torch.float64)
    group = torch.tensor([0, 1, 0, 0, 1, 2, 2])
    kept, tau = largest(priority, group, torch.tensor([2, 2, 1, 4]))
    assert kept.tolist() == [True, True, True, False, True, True, False]  # of equal ones the earlier
    assert tau.tolist() == [3, -math.inf, -math.inf, -math.inf]
    kept, tau = largest(priority[:0], group[:0], torch.tensor([2]))
    assert kept.tolist() == []
    assert tau.tolist() == [-math.inf]


def test_capacity_zero_evicts_everything():
    kept, tau = largest(torch.tensor([1.0, 2.0]).double(), torch.tensor([0, 0]), torch.tensor([0]))
    assert not kept.any()
    assert tau.tolist() == [2.0]


def test_inclusion_of_a_union():
    q = torch.tensor([[0.2, 1.0, 0.5], [0.3, 0.4, 3.0]], dtype=torch.float64)
    want = 1 - (1 - q.clamp(max=1)).prod(0)
    torch.testing.assert_close(log_inclusion(q.log()).exp(), want)
    tiny = torch.full((2, 1), -800.0, dtype=torch.float64)
    assert -800 <= float(log_inclusion(tiny)) <= -799
    assert torch.equal(log_inclusion(q[:1].log()), q[:1].log()[0])


@pytest.mark.parametrize("spread", [0.1, 3.0, 40.0])
def test_shares_are_met_on_average(spread):
    generator = torch.Generator().manual_seed(2)
    amounts = spread * torch.randn(500, generator=generator, dtype=torch.float64)
    log_w = torch.rand(500, generator=generator, dtype=torch.float64)
    group = torch.arange(500) % 3
    size = torch.tensor([20.0, 100.0, 1e9], dtype=torch.float64)
    scale = share_scales(amounts, log_w, group, size)
    expected = torch.zeros(3, dtype=torch.float64).index_add(
        0, group, log_w.exp() * (amounts + scale[group]).clamp(max=0).exp()
    )
    torch.testing.assert_close(expected[:2], size[:2])
    torch.testing.assert_close(expected[2], log_w[group == 2].exp().sum())  # everything
    assert share_scales(amounts, log_w, group, 0 * size).tolist() == [-math.inf] * 3


def test_totals_of_heads():
    amounts = torch.tensor([700.0, 701.0, -3.0], dtype=torch.float64)
    head = torch.tensor([0, 0, 2])
    want = [torch.logsumexp(amounts[:2], 0).item(), 0.0, -3.0]
    torch.testing.assert_close(log_totals(amounts, head, 3), torch.tensor(want, dtype=torch.float64))
