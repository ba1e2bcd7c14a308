"""Distances behind a projection."""

import pytest
import torch

from kvpress_prob.maths.projection import projection_factors


@pytest.mark.parametrize(("hidden", "heads", "width"), [(48, 4, 16), (5, 3, 16), (7, 1, 1)], ids=str)
def test_lengths_are_those_behind_the_projection(generator, hidden, heads, width):
    """With full column rank, without it, and for one number a head."""
    weight = torch.randn(hidden, heads * width, generator=generator, dtype=torch.float64)
    factors = projection_factors(weight, width)
    assert factors.shape == (heads, width, width)
    x = torch.randn(heads, 20, width, generator=generator, dtype=torch.float64)
    want = torch.stack([weight[:, h * width : (h + 1) * width] @ x[h].T for h in range(heads)]).norm(dim=1)
    torch.testing.assert_close((x @ factors).norm(dim=-1), want, atol=1e-12, rtol=1e-12)


def test_low_precision_weights_are_factored_in_float64(generator):
    weight = torch.randn(32, 32, generator=generator).bfloat16()
    assert torch.equal(projection_factors(weight, 16), projection_factors(weight.double(), 16))


def test_columns_that_do_not_fit_the_width_are_refused():
    with pytest.raises(ValueError, match="weight must have a multiple of 3 columns, got 16"):
        projection_factors(torch.zeros(8, 16), 3)
