"""Tables of frozen-head diagnostics, and the map."""

import numpy as np
import pandas as pd
import pytest
from scipy.stats import rankdata

from kvpress_prob.plots.head_map import head_map
from kvpress_prob.records.heads import area_under_curve, cells, summary


@pytest.fixture
def rows():
    generator = np.random.default_rng(0)
    index = [(layer, head, s, i) for layer in (0, 2) for head in range(3) for s in (4, 8) for i in range(6)]
    table = pd.DataFrame(index, columns=["layer", "head", "s", "position"])
    top = generator.uniform(0.1, 1, len(table))
    best = top * generator.uniform(0.4, 1, len(table))
    best[::4] = top[::4]
    return table.assign(
        dropped=np.where(table["head"] == 1, 0.6, 0.1) + generator.uniform(0, 0.1, len(table)), top=top, best=best,
        phi=top * 0.9, balanced=(top + best) / 2, swaps=(best < top).astype(int), free=best / 2, vote=top * 1.2,
        weighted_mass=best * 2, weighted_deviation=best * generator.uniform(0.5, 2, len(table)),
        kappa=top / best, closable=1 - best / top,
    )  # fmt: skip


def test_cells_are_medians(rows):
    table = cells(rows)
    assert len(table) == 12
    part = rows.query("layer == 2 and head == 1 and s == 8")
    line = table.query("layer == 2 and head == 1 and s == 8").iloc[0]
    for name in ("closable", "kappa", "dropped", "phi", "swaps"):
        assert line[name] == pytest.approx(part[name].median())
    assert line["free_ratio"] == pytest.approx(2)
    assert line["weighted_ratio"] == pytest.approx((part["weighted_deviation"] / part["best"]).median())
    # Flat at s = 8 marks the head at every budget.
    assert table[table["flat"]].groupby(["layer", "head"]).size().to_dict() == {(0, 1): 2, (2, 1): 2}


def test_summary_by_hand(rows):
    table = summary(rows).set_index("s")
    part = rows[rows["s"] == 4]
    label = (part["kappa"] > 1.11).to_numpy()
    pairs = [(a > b) + (a == b) / 2 for a in part["dropped"][label] for b in part["dropped"][~label]]
    assert table.loc[4, "auc"] == pytest.approx(np.mean(pairs))
    ranks = np.corrcoef(rankdata(part["phi"]), rankdata(part["best"]))[0, 1]
    assert table.loc[4, "spearman"] == pytest.approx(ranks)
    assert table.loc[4, "closable"] == pytest.approx(part["closable"].median())
    assert table.loc[4, "ratio_up_to_1.5"] == pytest.approx((part["kappa"] <= 1.5).mean())
    assert table.loc[4, "top_mass_is_best"] == pytest.approx((part["top"] == part["best"]).mean())
    assert table.loc[4, "balancing_recovers"] == pytest.approx(0.5)
    assert table.loc[4, "vote"] == pytest.approx(1.2)
    assert table.loc[4, "weighted_mass"] == pytest.approx(2)
    assert table.loc[4, "weighted_below_best"] == pytest.approx((part["weighted_deviation"] < part["best"]).mean())


def test_no_error_at_all(rows):
    """Rows whose attention sits on the kept keys: ratios are 1, rates are defined, what cannot be ranked is NaN."""
    errors = ["top", "best", "balanced", "phi", "free", "vote", "weighted_mass", "weighted_deviation", "closable"]
    still = rows.assign(**dict.fromkeys(errors, 0.0), kappa=1.0, swaps=0)
    line = summary(still).iloc[0]
    assert np.isnan(line["auc"])
    assert np.isnan(line["spearman"])
    assert (line["free_ratio"], line["vote"], line["top_mass_is_best"], line["ratio_up_to_1.5"]) == (1, 1, 1, 1)


def test_area_with_ties():
    assert area_under_curve(pd.Series([1.0, 1, 1]), pd.Series([True, False, False])) == 0.5
    assert area_under_curve(pd.Series([3.0, 1, 2]), pd.Series([True, False, False])) == 1


def test_map(rows):
    figure = head_map(cells(rows), 8)
    panels = [axes for axes in figure.axes if axes.images]
    assert len(panels) == 3
    want = cells(rows).query("s == 8").pivot_table(index="layer", columns="head", values="closable")
    np.testing.assert_allclose(panels[1].images[0].get_array(), want)
    assert panels[0].collections[0].get_offsets().tolist() == [[1, 0], [1, 1]]
    with pytest.raises(ValueError, match=r"s must be a budget of the cells, \[4, 8\], got 16"):
        head_map(cells(rows), 16)
