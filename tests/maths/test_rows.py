"""The row sample: how many rows, which ones, and unbiasedness over the offset."""

import pytest
import torch

from kvpress_prob.maths.proposals import row_prior
from kvpress_prob.maths.rows import sample_rows


@pytest.mark.parametrize("prior", ["uniform", "harmonic"])
@pytest.mark.parametrize("max_rows", [1, 2, 7, 64])
def test_at_most_max_rows_and_the_newest_among_them(prior, max_rows):
    weights = row_prior(prior, torch.ones(1, 200, dtype=torch.bool))
    rows, row_weights = sample_rows(weights, max_rows)
    assert len(rows) <= max_rows
    newest = torch.arange(200 - (max_rows + 1) // 2, 200)
    assert torch.isin(newest, rows).all()
    torch.testing.assert_close(row_weights[:, -len(newest) :], weights[:, -len(newest) :])
    assert (rows.diff() > 0).all()


@pytest.mark.parametrize("prior", ["uniform", "harmonic"])
def test_the_weighted_sum_is_unbiased_over_the_offset(prior):
    """A systematic sample's estimate is a piecewise constant function of its offset: the mean over a fine grid is its
    expectation."""
    weights = row_prior(prior, torch.ones(1, 200, dtype=torch.bool))
    f = torch.randn(200, dtype=torch.float64)
    estimates = []
    for offset in (torch.arange(500, dtype=torch.float64) + 0.5) / 500:
        rows, row_weights = sample_rows(weights, 20, float(offset))
        estimates.append(row_weights[0] @ f[rows])
    assert torch.stack(estimates).mean().item() == pytest.approx(float(weights[0] @ f), abs=1e-2)


def test_padding_rows_are_never_chosen():
    valid = torch.ones(1, 50, dtype=torch.bool)
    valid[:, :30] = False
    rows, _ = sample_rows(row_prior("uniform", valid), 10)
    assert rows.min() >= 30


def test_rows_without_weight_in_one_batch_row_have_weight_zero_there():
    valid = torch.ones(2, 50, dtype=torch.bool)
    valid[1, :30] = False
    rows, weights = sample_rows(row_prior("uniform", valid), 20)
    assert (weights[1, rows < 30] == 0).all()
    assert (weights[0] > 0).all()
