"""Accounting in bytes: presses compared where they hold the same, and what they hold beside SnapKV.

A *cell* is a model, a task, a length and a budget. A press at a ratio is paired with the ratio of the other press whose
measured bytes, as a share of the dense cache's, come nearest; further away than the tolerance there is no pair. The
pair's margin is the difference of mean scores over the requests that both answered, positive where the press is better;
its interval resamples contexts. A press *wins* a cell by a positive margin, ties at 0, loses by a negative one.
"""

from typing import Any, cast

import numpy as np
import pandas as pd

from kvpress_prob.records.schema import NO_PRESS
from kvpress_prob.records.statistics import bootstrap_means, interval

CELL = ["model", "length", "task"]
TIE = 1e-9
"""Points that are rounding."""


def matched_pairs(frame: pd.DataFrame, press: str, *, tolerance: float = 0.1) -> pd.DataFrame:
    """One press against every other one at matched measured bytes, cell by cell.

    Parameters
    ----------
    frame : DataFrame
        ``frames.read_frame``.
    press : str
    tolerance : float
        Largest difference of the bytes, as a share of the press' own.

    Returns
    -------
    columns model, length, task, press, ratio, bytes, other, other_ratio, other_bytes, requests, margin, low, high

    Raises
    ------
    ValueError
        For a press that the records do not have, or a negative tolerance.
    """
    if not tolerance >= 0:
        raise ValueError(f"tolerance must be at least 0, got {tolerance}")
    scored = frame[frame["score"].notna()]
    known = [name for name in dict.fromkeys(scored["press"]) if name != NO_PRESS]
    if press not in known:
        raise ValueError(f"press must be among {known}, got {press!r}")
    rows: list[dict[str, Any]] = []
    for cell, part in scored[scored["press"] != NO_PRESS].groupby(CELL, sort=False):
        held = _bytes(part)
        scores = part.pivot_table(index=["context", "example"], columns=["press", "ratio"], values="score")
        for (name, ratio), mine in cast(Any, held[held.index.get_level_values("press") == press].items()):
            for other in known:
                theirs = held[held.index.get_level_values("press") == other]
                if other == press or theirs.empty:
                    continue
                nearest = theirs.index[(theirs - mine).abs().argmin()]
                if abs(theirs[nearest] - mine) > tolerance * mine:
                    continue
                margin = (scores[(name, ratio)] - scores[nearest]).dropna()
                if margin.empty:
                    continue
                low, high = _interval(margin)
                line = dict(zip(CELL, cell, strict=True)) | {
                    "press": press, "ratio": ratio, "bytes": mine, "other": other, "other_ratio": nearest[1],
                    "other_bytes": theirs[nearest], "requests": len(margin), "margin": margin.mean(), "low": low,
                    "high": high,
                }  # fmt: skip
                rows.append(line)
    columns = [
        *CELL,
        "press",
        "ratio",
        "bytes",
        "other",
        "other_ratio",
        "other_bytes",
        "requests",
        "margin",
        "low",
        "high",
    ]
    return pd.DataFrame(rows, columns=columns)


def _bytes(part: pd.DataFrame) -> pd.Series:
    """Measured bytes over dense ones by (press, ratio), one count a context and seed."""
    once = part.drop_duplicates(["press", "ratio", "context", "seed"])
    sums = once.groupby(["press", "ratio"], sort=False)[["cache_bytes", "dense_bytes"]].sum()
    return sums["cache_bytes"] / sums["dense_bytes"]


def _interval(margin: pd.Series) -> tuple[float, float]:
    values = margin.to_numpy()[:, None]
    contexts = margin.index.get_level_values("context").to_numpy()
    low, high = interval(
        bootstrap_means(values, np.full(len(values), 1 / len(values)), np.zeros(len(values)), contexts)
    )
    return float(low[0]), float(high[0])


def tally(pairs: pd.DataFrame) -> pd.DataFrame:
    """Win, tie and loss of every opponent over the cells.

    Parameters
    ----------
    pairs : DataFrame
        ``matched_pairs``.

    Returns
    -------
    columns press, other, win, tie, loss, margin, smallest, largest
        Margins are mean, smallest and largest over the cells.
    """
    rows = [
        {
            "press": press, "other": other, "win": int((part["margin"] > TIE).sum()),
            "tie": int((part["margin"].abs() <= TIE).sum()), "loss": int((part["margin"] < -TIE).sum()),
            "margin": part["margin"].mean(), "smallest": part["margin"].min(), "largest": part["margin"].max(),
        }
        for (press, other), part in pairs.groupby(["press", "other"], sort=False)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["press", "other", "win", "tie", "loss", "margin", "smallest", "largest"])


def bytes_over(frame: pd.DataFrame, reference: str = "snapkv") -> pd.DataFrame:
    """Measured bytes of every press over those of a reference at the same ratio.

    Returns
    -------
    columns press, ratio, times

    Raises
    ------
    ValueError
        If the records do not have the reference.
    """
    held = _bytes(frame[frame["press"] != NO_PRESS])
    if reference not in held.index.get_level_values("press"):
        raise ValueError(f"reference must be among {sorted(set(frame['press']))}, got {reference!r}")
    table = held.rename("bytes").reset_index()
    base = table[table["press"] == reference].set_index("ratio")["bytes"]
    table["times"] = table["bytes"] / table["ratio"].map(base)
    return table.dropna(subset="times")[["press", "ratio", "times"]].reset_index(drop=True)


def ratio_table(frame: pd.DataFrame, presses: list[str] | None = None) -> pd.DataFrame:
    """Target ratio against the achieved one as mean and standard deviation over requests and seeds (table 1 of arXiv
    2608.28293).

    Returns
    -------
    DataFrame
        One line a ratio, one column a press, cells like ``0.4999 ± 0.0004``.
    """
    chosen = frame[(frame["press"] != NO_PRESS) & frame["press"].isin(presses or list(frame["press"].unique()))]
    achieved = chosen.groupby(["ratio", "press"], sort=False)["achieved_ratio"].agg(["mean", lambda it: it.std(ddof=0)])
    cells = achieved.apply(lambda line: f"{line.iloc[0]:.4f} ± {line.iloc[1]:.4f}", axis=1)
    table = cells.unstack("press").sort_index()
    return table[[press for press in dict.fromkeys(chosen["press"]) if press in table.columns]]
