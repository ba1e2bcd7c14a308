"""Split evaluation rows once into a half to tune on and a half to report on.

    python -m benchmarks.halves ruler/1024.parquet --half report --tasks niah_single_1 fwe --per-task 4 --output
    rows.jsonl

A row's half is a bit of the SHA-256 of its context's first 200 characters and its question: it depends on nothing else,
so no later choice can move a row from one half to the other.
"""

import argparse
import hashlib
from pathlib import Path

import pandas as pd

HALVES = ("tune", "report")


def half_of(context: str, question: str) -> str:
    """The half that a row belongs to."""
    return HALVES[int(hashlib.sha256((context[:200] + question).encode()).hexdigest(), 16) % 2]


def split(rows: pd.DataFrame, half: str, tasks: list[str] | None = None, per_task: int | None = None) -> pd.DataFrame:
    """The first ``per_task`` rows of every task that belong to a half, one of each task at a time: what a run that was
    stopped has read is balanced."""
    halves = [half_of(context, question) for context, question in zip(rows["context"], rows["question"], strict=True)]
    rows = rows[[it == half for it in halves]]
    if tasks is not None:
        unknown = set(tasks) - set(rows["task"])
        if unknown:
            raise ValueError(f"tasks must be among {sorted(set(rows['task']))}, got {sorted(unknown)}")
        rows = rows[rows["task"].isin(tasks)]
    number = rows.groupby("task").cumcount()
    rows = rows.iloc[number.to_numpy().argsort(kind="stable")]
    return rows if per_task is None else rows[number.loc[rows.index] < per_task]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="+", help="parquet files in kvpress' schema")
    parser.add_argument("--half", choices=HALVES, required=True)
    parser.add_argument("--tasks", nargs="+")
    parser.add_argument("--per-task", type=int, help="rows of every task and file")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(argv)
    parts = [split(pd.read_parquet(path), options.half, options.tasks, options.per_task) for path in options.data]
    rows = pd.concat(parts)
    rows.to_json(options.output, orient="records", lines=True)
    print(rows["task"].value_counts().to_string())


if __name__ == "__main__":
    main()
