"""Sweeps of several lengths as one result: ``python -m benchmarks.pooled RESULTS... --output FOLDER``.

Tasks that the dense cache hardly solves say nothing about a press: those below ``--floor`` are left out, per sweep. A
task at one length counts as one task; averages are over examples, intervals bootstrapped within tasks. The folder gets
the records without texts (``records.csv``), tables and figures.
"""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from benchmarks.running import show
from kvpress_prob.plots.figures import score_against_bytes, score_curves, with_legend
from kvpress_prob.plots.style import styles_of
from kvpress_prob.records import NO_PRESS, Record, read_config, read_records
from kvpress_prob.records.statistics import ALL, Tables, tabulate

KEPT = (
    "task", "example", "context", "press", "ratio", "seed", "query_aware", "masked", "achieved_ratio", "context_tokens",
    "dense_bytes", "cache_bytes", "padded_ratio", "prefill_ms", "score_ms", "compress_ms", "score", "config",
    "versions", "git_commit",
)  # fmt: skip


def pool(folders: list[Path], floor: float) -> list[Record]:
    """Records of all folders whose tasks the dense cache solves, with the sweep's name in the task's."""
    pooled = []
    for folder in folders:
        name, records = read_config(folder)["name"], read_records(folder)
        frame = pd.DataFrame([(it.task, it.score) for it in records if it.press == NO_PRESS], columns=["task", "score"])
        dense = frame.groupby("task")["score"].mean()
        solved = set(dense.index[dense >= floor])
        show(f"dense cache, {name}", dense.to_frame(), 1)
        pooled += [
            replace(it, task=f"{name}/{it.task}", example=f"{name}/{it.example}", context=f"{name}/{it.context}")
            for it in records
            if it.task in solved
        ]
    return pooled


def compare(tables: Tables, other: str) -> pd.DataFrame:
    """Average score with interval, its share of dense, the difference to another press, and bytes held."""
    scores = tables.scores[tables.scores["task"] == ALL].drop(columns="task")
    dense = float(scores.loc[scores["press"] == NO_PRESS, "score"].iloc[0])
    difference = tables.differences.query("other == @other").drop(columns="other")
    held = tables.budgets[["press", "ratio", "achieved", "bytes_fraction"]]
    table = scores.merge(difference, on=["press", "ratio"], how="left", suffixes=("", f"_to_{other}"))
    table = table.merge(held, on=["press", "ratio"]).assign(of_dense=table["score"] / dense)
    return table.sort_values(["ratio", "score"], ascending=[True, False]).reset_index(drop=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="results folders of sweeps, complete or not")
    parser.add_argument("--floor", type=float, default=30.0, help="smallest score of the dense cache (default: 30)")
    parser.add_argument("--other", default="kvzip", help="press that the others are compared with (default: kvzip)")
    parser.add_argument("--named", nargs="+", help="presses that the pictures name; the others are grey (default: all)")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    records = pool(options.results, options.floor)
    tables = tabulate(records)
    table = compare(tables, options.other)
    show(f"{tables.overview['examples']} examples of {tables.overview['tasks']} tasks", table, 3)
    options.output.mkdir(parents=True, exist_ok=True)
    pd.DataFrame([asdict(it) for it in records])[list(KEPT)].to_csv(options.output / "records.csv", index=False)
    table.to_csv(options.output / "averages.csv", index=False)
    for name in ("scores", "differences", "budgets", "layers"):
        getattr(tables, name).to_csv(options.output / f"{name}.csv", index=False)
    styles = styles_of(records)
    for name, figure in (
        ("score", score_curves(tables.scores, styles)),
        ("bytes", score_against_bytes(tables.scores, tables.budgets, styles)),
    ):
        with_legend(figure, styles, options.named).savefig(options.output / f"{name}.png", dpi=150)


if __name__ == "__main__":
    main()
