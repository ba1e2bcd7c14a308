"""Examples by benchmark and task: from the Hub, from local files in kvpress' schema, or generated.

kvpress' schema has the columns ``context``, ``question``, ``answer_prefix``, ``task`` and ``max_new_tokens``, and the
accepted answers in ``answer`` (RULER) or ``answers`` (LongBench).
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from datasets import load_dataset

from kvpress_prob.examples import generator
from kvpress_prob.examples.metrics import BENCHMARKS, LONGBENCH_METRICS
from kvpress_prob.records import Example

RULER_TASKS = (
    "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
    "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
)  # fmt: skip
LONGBENCH_TASKS = tuple(LONGBENCH_METRICS)
TASKS: dict[str, tuple[str, ...]] = {"ruler": RULER_TASKS, "longbench": LONGBENCH_TASKS}
HUB = {"ruler": "simonjegou/ruler", "longbench": "Xnhyacinth/LongBench"}
"""kvpress' datasets."""
COLUMNS = ("context", "question", "answer_prefix", "task", "max_new_tokens")
ANSWERS = {"ruler": "answer", "longbench": "answers"}

CountTokens = Callable[[str], int]


def load_examples(
    benchmark: str,
    data: str,
    *,
    count_tokens: CountTokens,
    tasks: list[str] | None = None,
    length: int = 4096,
    examples_per_task: int | None = None,
    max_context_tokens: int | None = None,
    seed: int = 0,
) -> list[Example]:
    """Examples of a benchmark, one of every task at a time, in the order of ``tasks``.

    Parameters
    ----------
    benchmark : {"ruler", "longbench"}
    data : str
        "hub", "generated" (RULER only), or the path of a parquet or JSON Lines file or of a folder of such files.
    count_tokens : callable
        Number of tokens of a text.
    tasks : list of str, optional
        None takes all tasks that the data has.
    length : int
        RULER's sequence length: which one of the Hub, or the longest to generate.
    examples_per_task : int, optional
        The first so many of each task; None takes all (10 when generating).
    max_context_tokens : int, optional
        Leaves out examples whose context has more tokens.
    seed : int
        Seed of generated examples.

    Raises
    ------
    ValueError
        If the data does not fit kvpress' schema, or nothing is left.
    """
    if benchmark not in BENCHMARKS:
        raise ValueError(f"benchmark must be one of {BENCHMARKS}, got {benchmark!r}")
    for task in tasks or []:
        if task not in TASKS[benchmark]:
            raise ValueError(f"tasks must be among {list(TASKS[benchmark])}, got {task!r}")
    if data == "generated":
        if benchmark != "ruler":
            raise ValueError(f"data='generated' needs benchmark='ruler', got {benchmark!r}")
        n = 10 if examples_per_task is None else examples_per_task
        wanted = tasks or list(generator.TASKS)
        examples = [
            example for task in wanted for example in generator.generate_examples(task, n, length, count_tokens, seed)
        ]
    else:
        table = _from_hub(benchmark, tasks, length) if data == "hub" else read_table(Path(data))
        examples = _examples(benchmark, table, data, tasks)
    if max_context_tokens is not None:
        examples = [example for example in examples if count_tokens(example.context) <= max_context_tokens]
    examples = _in_turn(examples, examples_per_task)
    if not examples:
        raise ValueError(
            f"data must leave at least one example, got none from {data!r} with tasks={tasks}, "
            f"max_context_tokens={max_context_tokens}, examples_per_task={examples_per_task}"
        )
    return examples


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
    # Answers are text: no guessing of numbers and dates.
    return pd.read_json(file, lines=True, dtype=cast(Any, False), convert_dates=False)


_READERS: dict[str, Callable[[Path], pd.DataFrame]] = {
    ".parquet": pd.read_parquet,
    ".jsonl": _read_json_lines,
    ".json": _read_json_lines,
}


def _from_hub(benchmark: str, tasks: list[str] | None, length: int) -> pd.DataFrame:
    folders = [str(length)] if benchmark == "ruler" else list(tasks or TASKS[benchmark])
    tables = [load_dataset(HUB[benchmark], data_dir=folder, split="test").to_pandas() for folder in folders]
    return pd.concat(cast(list[pd.DataFrame], tables), ignore_index=True)


def check_columns(benchmark: str, table: pd.DataFrame, name: str) -> None:
    """Raise ``ValueError`` unless the table has rows and kvpress' columns for the benchmark."""
    wanted = [*COLUMNS, ANSWERS[benchmark]]
    missing = [column for column in wanted if column not in table]
    if table.empty:
        raise ValueError(f"data must have rows, got none in '{name}'")
    if missing:
        raise ValueError(f"data must have the columns {wanted}, got none called {missing} in '{name}'")


def _examples(benchmark: str, table: pd.DataFrame, name: str, tasks: list[str] | None) -> list[Example]:
    check_columns(benchmark, table, name)
    present = list(dict.fromkeys(table["task"]))
    for task in tasks or present:
        if task not in present:
            raise ValueError(f"tasks must be among {present} of '{name}', got {task!r}")
        if task not in TASKS[benchmark]:
            raise ValueError(f"column 'task' must be among {list(TASKS[benchmark])}, got {task!r} in '{name}'")
    examples = []
    for task in tasks or present:
        rows = cast(pd.DataFrame, table[table["task"] == task])
        for number, row in enumerate(rows.to_dict("records")):
            classes = row.get("all_classes")  # None, or NaN where another table of the folder has no such column
            examples.append(
                Example(
                    name=f"{task}/{number}",
                    benchmark=benchmark,
                    task=task,
                    context=row["context"],
                    question=row["question"],
                    answer_prefix=row["answer_prefix"],
                    answers=[str(answer) for answer in row[ANSWERS[benchmark]]],
                    max_new_tokens=int(row["max_new_tokens"]),
                    all_classes=[str(label) for label in classes] if isinstance(classes, list | np.ndarray) else None,
                )
            )
    return examples


def _in_turn(examples: Iterable[Example], n: int | None) -> list[Example]:
    """The first ``n`` of each task, one of every task after the other: what a stopped sweep has done is balanced."""
    rounds: defaultdict[int, list[Example]] = defaultdict(list)
    seen: Counter[str] = Counter()
    for example in examples:
        rounds[seen[example.task]].append(example)
        seen[example.task] += 1
    return [example for number in sorted(rounds)[:n] for example in rounds[number]]
