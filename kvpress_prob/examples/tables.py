"""Tables of examples in kvpress' schema: read from files, and checked cell by cell.

The columns are ``context``, ``question``, ``answer_prefix``, ``task`` and ``max_new_tokens``, and the accepted answers
in ``answer`` (RULER) or ``answers`` (LongBench): a list of texts. One text alone is one answer, and numbers are read as
text.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import pandas as pd

from kvpress_prob.examples.tasks import ANSWERS, COLUMNS, TASKS
from kvpress_prob.records import Benchmark
from kvpress_prob.records.files import lines_of, parse_object
from kvpress_prob.values import WHOLE, is_number

CLASSIFICATION = "trec"
"""LongBench's task whose metric asks for the names of all classes."""


def read_table(path: Path) -> pd.DataFrame:
    """A parquet or JSON Lines file, or all such files of a folder one after the other.

    Raises
    ------
    ValueError
        If there is no such file, or it cannot be read.
    """
    files = sorted(file for file in path.iterdir() if file.suffix in _READERS) if path.is_dir() else [path]
    if not files or not all(file.is_file() and file.suffix in _READERS for file in files):
        raise ValueError(f"data must be 'hub', 'generated' or a file or folder of {sorted(_READERS)}, got '{path}'")
    tables = []
    for file in files:
        try:
            tables.append(_READERS[file.suffix](file))
        except (ValueError, OSError) as error:
            raise ValueError(f"data must be readable, got '{file}': {error}") from error
    return pd.concat(tables, ignore_index=True)


def _read_json_lines(file: Path) -> pd.DataFrame:
    lines = [(number, line) for number, line in lines_of(file.read_bytes()) if line.strip()]
    # As objects: a number stays the number that it was where another row lacks the column.
    return pd.DataFrame([parse_object(line, file, number) for number, line in lines], dtype=object)


_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": pd.read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
}


def checked_table(benchmark: Benchmark, table: pd.DataFrame, name: str) -> pd.DataFrame:
    """The table with every list of answers as a list of texts.

    Parameters
    ----------
    benchmark : {"ruler", "longbench"}
    table : DataFrame
        One example a row; not changed.
    name : str
        Of the data, for messages.

    Raises
    ------
    ValueError
        Unless the table has rows, and kvpress' columns with values that the benchmark's scorer can use.
    """
    wanted = [*COLUMNS, ANSWERS[benchmark]]
    missing = [column for column in wanted if column not in table]
    if table.empty:
        raise ValueError(f"data must have rows, got none in '{name}'")
    if missing:
        raise ValueError(f"data must have the columns {wanted}, got none called {missing} in '{name}'")
    answers = []
    for number, row in enumerate(table.to_dict("records"), 1):
        try:
            answers.append(_checked_row(benchmark, row))
        except ValueError as error:
            raise ValueError(f"data must fit kvpress' schema, got row {number} of '{name}': {error}") from error
    return table.assign(**{ANSWERS[benchmark]: pd.Series(answers, index=table.index, dtype=object)})


def _checked_row(benchmark: Benchmark, row: dict[Any, Any]) -> list[str]:
    """The row's answers; ``ValueError`` if a cell is not what it should be."""
    for column in ("context", "question", "answer_prefix", "task"):
        _text(column, row[column])
    if row["task"] not in TASKS[benchmark]:
        raise ValueError(f"column 'task' must be among {list(TASKS[benchmark])}, got {row['task']!r}")
    tokens = row["max_new_tokens"]
    if (
        isinstance(tokens, bool | np.bool_)
        or not isinstance(tokens, int | float | np.number)
        or not 1 <= tokens < WHOLE
    ):
        raise ValueError(f"max_new_tokens must be at least 1 and below 2^63, got {tokens!r}")
    if tokens != int(tokens):
        raise ValueError(f"max_new_tokens must be a whole number, got {tokens!r}")
    classes = row.get("all_classes")
    if row["task"] == CLASSIFICATION and (not _is_list(classes) or len(classes) == 0):
        raise ValueError(f"all_classes must be a list of class names for {CLASSIFICATION}, got {classes!r}")
    column = ANSWERS[benchmark]
    answers = row[column]
    answers = list(answers) if _is_list(answers) else [answers]
    if not answers:
        raise ValueError(f"{column} must not be empty")
    return [_answer(benchmark, row["task"], column, answer) for answer in answers]


def _is_list(value: Any) -> TypeGuard[list | tuple | np.ndarray]:
    return isinstance(value, list | tuple | np.ndarray)


def _text(column: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{column} must be text, got {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{column} must be text that UTF-8 can hold: {error}") from error
    return value


def _answer(benchmark: Benchmark, task: str, column: str, value: Any) -> str:
    number = is_number(value) or (isinstance(value, np.number) and np.isfinite(value))
    answer = _text(column, str(value) if number else value)
    if benchmark == "ruler" and not answer.strip():
        raise ValueError(f"{column} must not hold blank text, which every prediction contains")
    if task == "passage_retrieval_en" and not re.search(r"Paragraph \d", answer):
        raise ValueError(f"{column} must name a paragraph as 'Paragraph 7' does, got {answer!r}")
    return answer
