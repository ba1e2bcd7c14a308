"""Which records can certify a press: all of them scored, of numbers, and with the dense cache's beside them."""

from collections.abc import Callable
from typing import cast

import numpy as np
import pandas as pd

from kvpress_prob.records.schema import NO_PRESS
from kvpress_prob.values import WHOLE


def certifiable(frame: pd.DataFrame, presses: list[str] | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The records of the presses that are judged, and those of the dense cache.

    Parameters
    ----------
    frame : DataFrame
        ``frames.read_frame``.
    presses : list of str, optional
        Default: all.

    Raises
    ------
    ValueError
        For an unknown press, records without scores, what is no number in its range, a request without
        its one dense record, and a press without records of all requests at a ratio.
    """
    known = list(dict.fromkeys(frame.loc[frame["press"] != NO_PRESS, "press"]))
    if not known:
        raise ValueError(f"records must have scores of a press, got presses {sorted(set(frame['press']))} with none")
    unknown = sorted(set(presses or []) - set(known))
    if unknown:
        raise ValueError(f"presses must be among {known}, got {unknown}")
    chosen = frame[frame["press"].isin([NO_PRESS, *(presses or known)])]
    missing = chosen["score"].isna()
    if missing.any():
        raise ValueError(
            f"records must all have a score, got {missing.sum()} of {len(chosen)} without one, of "
            f"{sorted(set(chosen.loc[missing, 'press']))}"
        )
    numbers = {name: _numbers(chosen[name], *wanted) for name, wanted in _WANTED.items()}
    chosen = chosen.assign(**numbers)
    is_dense = chosen["press"] == NO_PRESS
    dense, judged = chosen[is_dense], chosen[~is_dense]
    twice = dense.loc[dense["example"].duplicated(), "example"].tolist()
    if twice:
        raise ValueError(f"every request must have one record of the dense cache, got more for {_some(twice)}")
    alone = sorted(set(judged["example"]) - set(dense["example"]))
    if alone:
        raise ValueError(
            f"every request must have its record of the dense cache (press {NO_PRESS!r}), got none for {_some(alone)}"
        )
    _check_complete(judged, dense)
    return judged, dense


_WANTED: dict[str, tuple[str, Callable[[pd.Series], pd.Series]]] = {
    "score": ("numbers", np.isfinite),
    "ratio": ("numbers in [0, 1)", lambda found: (found >= 0) & (found < 1)),
    "dense_bytes": ("numbers > 0", lambda found: (found > 0) & (found < WHOLE)),
    "cache_bytes": ("numbers >= 0", lambda found: (found >= 0) & (found < WHOLE)),
}


def _numbers(column: pd.Series, wanted: str, fits: Callable[[pd.Series], pd.Series]) -> pd.Series:
    """The column as finite numbers in their range."""
    found = pd.to_numeric(column, errors="coerce")
    right = fits(found)
    if not right.all():
        raise ValueError(f"{column.name} must be {wanted} in all records, got {column[~right].iloc[0]!r}")
    return found


def _check_complete(judged: pd.DataFrame, dense: pd.DataFrame) -> None:
    """``ValueError`` unless every press has, at every ratio, records of all contexts of the dense cache."""
    contexts = set(dense["context"])
    for policy, rows in judged.groupby(["press", "ratio"], sort=False):
        press, ratio = cast(tuple[str, float], policy)
        missing = sorted(contexts - set(rows["context"]))
        if missing:
            raise ValueError(
                f"a press must have records of all contexts of the dense cache, got {press!r} at ratio {ratio:g} "
                f"without {len(missing)} of {len(contexts)}: {missing[:3]}"
            )


def _some(examples: list[str]) -> str:
    return f"{len(examples)}: {examples[:3]}"
