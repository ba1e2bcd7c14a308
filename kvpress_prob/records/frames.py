"""Records as a pandas frame, from a results folder or from the pooled table that a repository keeps."""

from dataclasses import asdict
from pathlib import Path

import pandas as pd

from kvpress_prob.records.files import CONFIG, RECORDS, read_config, read_records
from kvpress_prob.records.schema import Record

TABLE = "records.csv"
"""Records without texts and lists, as ``benchmarks.pooled`` writes them."""
NEEDED = ("task", "example", "press", "ratio", "seed", "masked", "dense_bytes", "cache_bytes", "score")


def records_file(results: Path) -> Path:
    """The file that holds the records of a results folder: ``records.jsonl``, else ``records.csv``; a CSV file itself.

    Raises
    ------
    ValueError
        If there is none.
    """
    if results.suffix == ".csv" and results.is_file():
        return results
    for name in (RECORDS, TABLE):
        if (results / name).is_file():
            return results / name
    raise ValueError(f"{results} must be a results folder or a table of records, got no {RECORDS} and no {TABLE}")


def read_frame(results: Path) -> pd.DataFrame:
    """One row a record; ``seed`` is -1 for none, ``model`` and ``length`` are the sweep's ("" and 0 where unknown).

    A table without a column ``context`` has one context an example.

    Raises
    ------
    ValueError
        If there are no records, the file is no table, or a needed column is missing.
    """
    file = records_file(results)
    if file.name == RECORDS:
        config = read_config(results) if (results / CONFIG).is_file() else {}
        frame = records_frame(read_records(results))
        return frame.assign(model=config.get("model", ""), length=config.get("length", 0))
    try:
        frame = pd.read_csv(file)
    except ValueError as error:  # pandas' own and those of the encoding
        raise ValueError(f"'{file}' must be a table of records: {error}") from error
    missing = sorted(set(NEEDED) - set(frame.columns))
    if missing or frame.empty:
        raise ValueError(f"{file} must have records with the columns {list(NEEDED)}, got none of {missing or 'them'}")
    if "context" not in frame.columns:
        frame["context"] = frame["example"]
    try:
        frame["seed"] = frame["seed"].fillna(-1).astype("int64")
    except (ValueError, OverflowError) as error:
        raise ValueError(f"'{file}' must have whole numbers of 64 bits as seeds: {error}") from error
    return frame.assign(**{name: value for name, value in (("model", ""), ("length", 0)) if name not in frame.columns})


def records_frame(records: list[Record]) -> pd.DataFrame:
    """One row a record; ``seed`` -1 for none."""
    frame = pd.DataFrame([asdict(record) for record in records])
    frame["seed"] = [-1 if record.seed is None else record.seed for record in records]
    return frame
