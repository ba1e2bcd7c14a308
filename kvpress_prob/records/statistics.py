r"""From records to the tables of a report, every score with its bootstrap interval over contexts.

*Total score*: the mean over all examples, which is the mean of the tasks' scores weighted by their share of examples
(arXiv 2608.28293, section 7). *Win score*: on each example a press wins against every other press whose score is not
higher, so ties are wins for both; wins are averaged over a task's examples, then over tasks, and divided by the number
of other presses::

    win_a = 1 / (n - 1)  mean_tasks  mean_examples  #{b != a : score_b <= score_a}

*Intervals*: 95 % percentile intervals of 2,000 resamples of the contexts, drawn within tasks: questions about one
context share its cache and come and go together. From a task with ``n`` contexts ``n - 1`` are drawn and weighted
``n / (n - 1)``, so that few contexts a task do not make the interval too narrow (Rao and Wu, Resampling inference with
complex survey data, 1988); a task with one context leaves no interval. The same resamples serve every press, so a
difference of two presses has a paired interval. Several seeds of a press are averaged per example first (for the win
score: the wins are).
"""

from dataclasses import asdict, dataclass
from typing import cast

import numpy as np
import pandas as pd

from kvpress_prob.records.schema import NO_PRESS, Record

RESAMPLES = 2000
ALL = "all"
"""How tables call the total over all tasks."""
INDEX = ["task", "context", "example"]


@dataclass(frozen=True)
class Tables:
    """The tables of a report; a column ``low``/``high`` pair is an interval.

    Attributes
    ----------
    scores : columns press, ratio, task, score, low, high, examples
        ``task`` is "all" for the total score.
    wins : columns press, ratio, win, low, high
    differences : columns press, other, ratio, difference, low, high
        Total score of ``press`` minus that of ``other`` on the same examples.
    budgets : columns press, ratio, achieved, achieved_std, bytes, bytes_fraction, masked, effective
        Target against achieved ratio, and measured bytes of the cache.
    layers : columns press, ratio, layer, layer_ratio
    errors : columns press, ratio, error, low, high, error_abs
        Attention error; empty where it was not measured.
    costs : columns press, score_ms, compress_ms, decode_ms_per_token
    overview : dict
        Counts of examples, presses and rows, versions, seconds of decoding.
    """

    scores: pd.DataFrame
    wins: pd.DataFrame
    differences: pd.DataFrame
    budgets: pd.DataFrame
    layers: pd.DataFrame
    errors: pd.DataFrame
    costs: pd.DataFrame
    overview: dict[str, float | int | str | None]


def tabulate(records: list[Record]) -> Tables:
    """All tables of a run. Examples that some press has not been run on yet are left out of comparisons."""
    frame = pd.DataFrame([asdict(record) for record in records])
    frame["seed"] = [-1 if record.seed is None else record.seed for record in records]
    scored = frame[frame["score"].notna()]
    measured = frame[frame["attention_error"].notna()]
    return Tables(
        scores=_scores(scored),
        wins=win_scores(scored),
        differences=_differences(scored),
        budgets=_budgets(frame),
        layers=_layers(frame),
        errors=_errors(measured),
        costs=_costs(frame),
        overview=_overview(frame),
    )


def bootstrap_means(
    values: np.ndarray,
    weights: np.ndarray,
    strata: np.ndarray,
    clusters: np.ndarray | None = None,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> np.ndarray:
    """Weighted sums of resampled rows.

    Parameters
    ----------
    values : [n, k]
        One row an example.
    weights : [n]
        What an example counts for in the estimate ``weights @ values``.
    strata : [n]
        Clusters are resampled within equal values; one over several strata is resampled among those over the same.
    clusters : [n], optional
        Rows of equal value are drawn together. Default: every row alone.
    resamples, seed : int

    Returns
    -------
    [resamples, k]
        NaN if a stratum has one cluster.
    """
    cluster = np.arange(len(values)) if clusters is None else pd.factorize(clusters)[0]
    of_cluster = pd.Series(strata).groupby(cluster).agg(lambda part: tuple(sorted(set(part), key=str)))
    stratum = pd.factorize(of_cluster)[0]
    generator = np.random.default_rng(seed)
    counts = np.zeros((resamples, len(stratum)))
    for number in np.unique(stratum):
        members = np.flatnonzero(stratum == number)
        n = len(members)
        drawn = generator.multinomial(n - 1, np.full(n, 1 / n), size=resamples)
        counts[:, members] = drawn * (n / (n - 1)) if n > 1 else np.nan
    return (counts[:, cluster] * weights) @ values


def interval(resampled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """95 % percentile interval of each column."""
    low, high = np.percentile(resampled, [2.5, 97.5], axis=0)
    return low, high


def win_shares(scores: np.ndarray) -> np.ndarray:
    """Share of the other columns that each entry of a row is not worse than; [n, k] to [n, k]."""
    beaten = (scores[:, :, None] >= scores[:, None, :]).sum(-1) - 1
    return beaten / max(scores.shape[1] - 1, 1)


def _matrix(frame: pd.DataFrame, value: str) -> pd.DataFrame:
    """Examples by (press, ratio), seeds averaged; only examples that have every column. Indexed by ``INDEX``."""
    return frame.pivot_table(index=INDEX, columns=["press", "ratio"], values=value, aggfunc="mean").dropna()


def _resampled(table: pd.DataFrame, weights: np.ndarray) -> np.ndarray:
    tasks, contexts = (table.index.get_level_values(name).to_numpy() for name in ("task", "context"))
    return bootstrap_means(table.to_numpy(), weights, tasks, contexts)


def _scores(frame: pd.DataFrame) -> pd.DataFrame:
    columns = ["press", "ratio", "task", "score", "low", "high", "examples"]
    matrix = _matrix(frame, "score")
    if matrix.empty:
        return pd.DataFrame(columns=columns)
    tasks = matrix.index.get_level_values("task").to_numpy()
    rows = []
    for task in [ALL, *pd.unique(tasks)]:
        part = matrix if task == ALL else matrix[tasks == task]
        values, weights = part.to_numpy(), np.full(len(part), 1 / len(part))
        low, high = interval(_resampled(part, weights))
        rows += [
            (press, ratio, task, *figures, len(part))
            for (press, ratio), *figures in zip(matrix.columns, weights @ values, low, high, strict=True)
        ]
    return pd.DataFrame(rows, columns=columns)


def win_scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Win scores among the presses at each ratio; the dense cache does not take part."""
    frame = frame[frame["press"] != NO_PRESS]
    rows = []
    for ratio, part in frame.groupby("ratio"):
        presses = list(dict.fromkeys(part["press"]))
        wide = part.pivot_table(index=[*INDEX, "seed"], columns="press", values="score")[presses]
        # A press that draws nothing has one row (seed -1) for all seeds.
        seeds = wide.groupby(INDEX).ffill()
        seeds = seeds.dropna()
        shares = pd.DataFrame(win_shares(seeds.to_numpy()), index=seeds.index, columns=presses)
        shares = shares.groupby(INDEX).mean()
        if shares.empty:
            continue
        tasks = shares.index.get_level_values("task").to_numpy()
        _, place, sizes = np.unique(tasks, return_inverse=True, return_counts=True)
        weights = 1 / (sizes[place] * len(sizes))
        low, high = interval(_resampled(shares, weights))
        means = weights @ shares.to_numpy()
        rows += [(press, ratio, *figures) for press, *figures in zip(presses, means, low, high, strict=True)]
    return pd.DataFrame(rows, columns=["press", "ratio", "win", "low", "high"])


def _differences(frame: pd.DataFrame) -> pd.DataFrame:
    columns = ["press", "other", "ratio", "difference", "low", "high"]
    matrix = _matrix(frame, "score")
    if matrix.empty:
        return pd.DataFrame(columns=columns)
    dense = matrix[(NO_PRESS, 0.0)] if (NO_PRESS, 0.0) in matrix.columns else None
    weights = np.full(len(matrix), 1 / len(matrix))
    rows = []
    for ratio in dict.fromkeys(ratio for press, ratio in matrix.columns if press != NO_PRESS):
        part = matrix.xs(ratio, axis=1, level="ratio").drop(columns=NO_PRESS, errors="ignore")
        if dense is not None:
            part = part.assign(**{NO_PRESS: dense})
        values = part.to_numpy()
        resampled = _resampled(cast(pd.DataFrame, part), weights)
        means = weights @ values
        for a, press in enumerate(part.columns):
            low, high = interval(resampled[:, [a]] - resampled)
            rows += [
                (press, other, ratio, means[a] - means[b], low[b], high[b])
                for b, other in enumerate(part.columns)
                if a != b
            ]
    return pd.DataFrame(rows, columns=columns)


def _budgets(frame: pd.DataFrame) -> pd.DataFrame:
    frame = frame.assign(fraction=frame["cache_bytes"] / frame["dense_bytes"])
    grouped = frame.groupby(["press", "ratio"], sort=False)
    return grouped.agg(
        achieved=("achieved_ratio", "mean"),
        achieved_std=("achieved_ratio", lambda values: values.std(ddof=0)),
        bytes=("cache_bytes", "mean"),
        bytes_fraction=("fraction", "mean"),
        masked=("masked", "any"),
        effective=("effective_fraction", "mean"),
    ).reset_index()


def _layers(frame: pd.DataFrame) -> pd.DataFrame:
    rows = []
    for (press, ratio), part in frame[frame["ratio"] > 0].groupby(["press", "ratio"], sort=False):
        mean = np.mean(part["layer_ratios"].to_list(), axis=0)
        rows += [(press, ratio, layer, value) for layer, value in enumerate(mean)]
    return pd.DataFrame(rows, columns=["press", "ratio", "layer", "layer_ratio"])


def _errors(frame: pd.DataFrame) -> pd.DataFrame:
    columns = ["press", "ratio", "error", "low", "high", "error_abs"]
    matrix, absolute = (_matrix(frame, name) for name in ("attention_error", "attention_error_abs"))
    if matrix.empty:
        return pd.DataFrame(columns=columns)
    weights = np.full(len(matrix), 1 / len(matrix))
    low, high = interval(_resampled(matrix, weights))
    means = weights @ matrix.to_numpy(), low, high, weights @ absolute.to_numpy()
    rows = [(*column, *figures) for column, *figures in zip(matrix.columns, *means, strict=True)]
    return pd.DataFrame(rows, columns=columns)


def _costs(frame: pd.DataFrame) -> pd.DataFrame:
    per_token = frame["decode_ms"] / frame["generated_tokens"]
    frame = frame.assign(decode_ms_per_token=per_token.astype(float))
    return frame.groupby("press", sort=False)[["score_ms", "compress_ms", "decode_ms_per_token"]].mean().reset_index()


def _overview(frame: pd.DataFrame) -> dict[str, float | int | str | None]:
    """Counts, versions and seconds of decoding."""
    return {
        "examples": int(frame["example"].nunique()),
        "tasks": int(frame["task"].nunique()),
        "presses": int(frame["press"].nunique()),
        "rows": len(frame),
        "context_tokens": float(frame["context_tokens"].mean()),
        "query_aware": bool(frame["query_aware"].any()),
        "decode": ", ".join(sorted(frame["decode"].unique())),
        "versions": "; ".join(frame["versions"].unique()),
        "git_commit": "; ".join(frame["git_commit"].dropna().unique()) or None,
        "decode_seconds": float((frame["batch_ms"] / frame["batch_rows"]).fillna(frame["decode_ms"]).sum()) / 1e3,
    }
