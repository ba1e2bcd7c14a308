"""Tables of frozen-head diagnostics: cells (one head of one layer at one budget), and one line a budget.

A cell is *flat* when its attention leaves a median mass above a quarter outside its eight largest weights: there a
better kept set can still change something. *How well dropped mass tells* is the AUC of ``m_s`` for the label
``kappa > 1.11``; *how well Phi ranks* is Spearman's correlation of ``Phi`` with ``ES_pool``.
"""

import math
from typing import Any, cast

import numpy as np
import pandas as pd

from kvpress_prob.extras import extra

with extra("eval", "Comparing heads"):
    from scipy.stats import mannwhitneyu, spearmanr

FLAT_BUDGET, FLAT_MASS = 8, 0.25
LABEL = 1.11
"""``kappa`` above which the best subset is at least a tenth better than top mass."""


def cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Medians of every layer, query head and budget.

    Parameters
    ----------
    rows : DataFrame
        ``prefills.frozen_heads.diagnose_heads``.

    Returns
    -------
    columns layer, head, s, closable, kappa, dropped, phi, free_ratio, weighted_ratio, swaps, flat
        ``free_ratio`` is ``ES_pool / EF``, ``weighted_ratio`` the weighted estimator's error over ``ES_pool``.
    """
    table = rows.assign(
        free_ratio=_ratio(rows["best"], rows["free"]), weighted_ratio=_ratio(rows["weighted_deviation"], rows["best"])
    )
    columns = ["closable", "kappa", "dropped", "phi", "free_ratio", "weighted_ratio", "swaps"]
    table = table.groupby(["layer", "head", "s"])[columns].median().reset_index()
    flat = table[(table["s"] == FLAT_BUDGET) & (table["dropped"] > FLAT_MASS)]
    marked = set(zip(flat["layer"], flat["head"], strict=True))
    return table.assign(flat=[cell in marked for cell in zip(table["layer"], table["head"], strict=True)])


def summary(rows: pd.DataFrame) -> pd.DataFrame:
    """One line a budget: what the text reports of its models."""
    lines = []
    for s, part in rows.groupby("s"):
        gap = part["top"] - part["best"]
        open_ = gap > 1e-9 * part["top"]
        label = (part["kappa"] > LABEL) & (part["top"] > 0)
        lines.append(
            {
                "s": s,
                "rows": len(part),
                "closable": part["closable"].median(),
                "closable_where_larger": part.loc[label, "closable"].median(),
                "ratio_up_to_1.5": (part["kappa"] <= 1.5).mean(),
                "ratio_up_to_2": (part["kappa"] <= 2).mean(),
                "ratio_above_1.11": label.mean(),
                "top_mass_is_best": (~open_).mean(),
                "balancing_recovers": ((part["top"] - part["balanced"]) / gap)[open_].median(),
                "swaps": part["swaps"].median(),
                "dropped": part["dropped"].median(),
                "auc": area_under_curve(part["dropped"], label),
                "spearman": _spearman(part["phi"], part["best"]),
                "free_ratio": _ratio(part["best"], part["free"]).median(),
                "vote": _ratio(part["vote"], part["top"]).median(),
                "weighted_mass": _ratio(part["weighted_mass"], part["best"]).median(),
                "weighted_deviation": _ratio(part["weighted_deviation"], part["best"]).median(),
                "weighted_below_best": (part["weighted_deviation"] < part["best"]).mean(),
            }
        )
    return pd.DataFrame(lines)


def area_under_curve(score: pd.Series, label: pd.Series) -> float:
    """Chance that a row with the label has the larger score, ties counted half; NaN without both kinds."""
    positive, negative = score[label], score[~label]
    if positive.empty or negative.empty:
        return math.nan
    return float(cast(Any, mannwhitneyu(positive, negative)).statistic) / (len(positive) * len(negative))


def _spearman(one: pd.Series, other: pd.Series) -> float:
    if one.nunique() < 2 or other.nunique() < 2:
        return math.nan
    return float(cast(Any, spearmanr(one, other)).statistic)


def _ratio(one: pd.Series, other: pd.Series) -> pd.Series:
    """``one / other``; 1 where both are 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return (one / other).where((one > 0) | (other > 0), 1.0)
