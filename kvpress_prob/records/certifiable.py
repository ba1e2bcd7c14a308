"""Which records can certify a press: all of them scored, of numbers, and with the dense cache's beside them."""

import numpy as np
import pandas as pd

from kvpress_prob.records.schema import NO_PRESS


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
        For an unknown press, records without scores, what is no number, and a request without its one dense record.
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
    numbers = {name: _numbers(chosen[name], positive) for name, positive in _POSITIVE.items()}
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
    return judged, dense


_POSITIVE = {"score": False, "ratio": False, "dense_bytes": True, "cache_bytes": False}


def _numbers(column: pd.Series, positive: bool) -> pd.Series:
    """The column as finite numbers, above 0 where they must be."""
    found = pd.to_numeric(column, errors="coerce")
    right = np.isfinite(found) & ((found > 0) if positive else True)
    if not right.all():
        wanted = "numbers > 0" if positive else "numbers"
        raise ValueError(f"{column.name} must be {wanted} in all records, got {column[~right].iloc[0]!r}")
    return found


def _some(examples: list[str]) -> str:
    return f"{len(examples)}: {examples[:3]}"
