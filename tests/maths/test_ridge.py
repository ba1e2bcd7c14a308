"""Ridge regression from moments against numpy's and scipy's solutions from the rows themselves."""

import numpy as np
import pytest
import scipy.linalg
import torch

from kvpress_prob.maths.ridge import (
    Readout,
    combined,
    moments,
    of_layers,
    r_squared,
    solve_ridge,
    squared_error,
    top_recall,
    without,
)

FIELDS = ("count", "mean_x", "mean_y", "xx", "xy", "yy")


def rows(seed: int, n: int, p: int = 7, k: int = 3, layers: int = 2, offset: float = 0.0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(layers, n, p, generator=generator, dtype=torch.float64) * torch.arange(1, p + 1) + offset
    weight = torch.randn(layers, p, k, generator=generator, dtype=torch.float64)
    return x, x @ weight + torch.randn(layers, n, k, generator=generator, dtype=torch.float64) + 5


@pytest.mark.parametrize("offset", [0.0, 1e6])
def test_moments_are_numpys_whatever_the_blocks(offset):
    x, y = rows(0, 500, offset=offset)
    accumulated = moments(x[:, :1], y[:, :1])
    for begin, end in ((1, 120), (120, 121), (121, 500)):
        accumulated = combined(accumulated, moments(x[:, begin:end], y[:, begin:end]))
    for layer in range(2):
        a, b = x[layer].numpy(), y[layer].numpy()
        covariance = np.cov(np.concatenate((a, b), 1).T, bias=True) * 500
        np.testing.assert_allclose(accumulated.xx[layer], covariance[:7, :7], rtol=1e-8, atol=1e-6)
        np.testing.assert_allclose(accumulated.xy[layer], covariance[:7, 7:], rtol=1e-8, atol=1e-6)
        np.testing.assert_allclose(accumulated.yy[layer], np.diag(covariance)[7:], rtol=1e-8)
        np.testing.assert_allclose(accumulated.mean_x[layer], a.mean(0), rtol=1e-12, atol=1e-12)
    assert accumulated.count == 500


def test_float32_rows_are_accumulated_in_float64():
    x, y = rows(1, 4000)
    m = moments(x.float(), y.float())
    assert m.xx.dtype == torch.float64
    torch.testing.assert_close(m.xx, moments(x.float().double(), y.float().double()).xx, rtol=1e-13, atol=1e-9)


def test_leaving_a_part_out_undoes_adding_it():
    x, y = rows(2, 300)
    kept, left_out = moments(x[:, :200], y[:, :200]), moments(x[:, 200:], y[:, 200:])
    again = without(combined(kept, left_out), left_out)
    for name in FIELDS:
        torch.testing.assert_close(getattr(again, name), getattr(kept, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 1.0])
def test_the_solution_is_scipys_least_squares_of_the_augmented_rows(ridge):
    x, y = rows(3, 120)
    readout = solve_ridge(moments(x, y), ridge)
    for layer in range(2):
        a, b = x[layer].numpy(), y[layer].numpy()
        z = (a - a.mean(0)) / a.std(0)
        augmented = np.concatenate((z, np.sqrt(120 * ridge) * np.eye(7)))
        solution = scipy.linalg.lstsq(augmented, np.concatenate((b - b.mean(0), np.zeros((7, 3)))))
        assert solution is not None
        np.testing.assert_allclose(readout.weight[layer], solution[0], rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(readout(x)[layer], z @ solution[0] + b.mean(0), rtol=1e-7)


def test_an_input_that_never_changes_has_no_say():
    x, y = rows(4, 100)
    x[:, :, 2] = 1e4
    readout = solve_ridge(moments(x, y), 1e-3)
    assert (readout.weight[:, 2] == 0).all()
    assert (readout.scale[:, 2] == 1).all()
    assert torch.isfinite(readout.weight).all()


def test_more_inputs_than_rows_are_solved():
    x, y = rows(5, 4)
    assert torch.isfinite(solve_ridge(moments(x, y), 1e-3).weight).all()


def test_held_out_r_squared_from_moments_is_that_of_the_predictions():
    x, y = rows(6, 400)
    readout = solve_ridge(moments(x[:, :300], y[:, :300]), 1e-3)
    held = x[:, 300:], y[:, 300:]
    residual = held[1] - readout(held[0])
    total = held[1] - held[1].mean(1, keepdim=True)
    expected = 1 - residual.square().sum(1) / total.square().sum(1)
    torch.testing.assert_close(r_squared(readout, moments(*held)), expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(squared_error(readout, moments(*held)), residual.square().mean(1), rtol=1e-9, atol=1e-9)
    assert (expected > 0.9).all()


def test_r_squared_of_a_wrong_read_out_is_negative():
    x, y = rows(7, 200)
    right = solve_ridge(moments(x, y), 1e-3)
    wrong = Readout(right.mean, right.scale, -right.weight, right.bias)
    assert (r_squared(wrong, moments(x, y)) < 0).all()


def test_layers_are_independent_problems():
    x, y = rows(8, 90, layers=4)
    whole = solve_ridge(moments(x, y), 1e-2)
    part = solve_ridge(of_layers(moments(x, y), slice(1, 3)), 1e-2)
    torch.testing.assert_close(part.weight, whole.weight[1:3])
    torch.testing.assert_close(solve_ridge(moments(x[1:2], y[1:2]), 1e-2).weight, whole.weight[1:2])


def test_recall_counts_the_largest_of_all_rows_together():
    target = torch.tensor([[4.0, 3.0, 0.0, 0.0], [2.0, 1.0, 0.0, 0.0]])
    assert top_recall(target, target, 0.5) == 1
    assert top_recall(-target, target, 0.5) == 0
    swapped = torch.tensor([[4.0, 0.0, 3.0, 0.0], [2.0, 1.0, 0.0, 0.0]])
    assert top_recall(swapped, target, 0.5) == 0.75
    assert top_recall(swapped, target, 0.125) == 1
