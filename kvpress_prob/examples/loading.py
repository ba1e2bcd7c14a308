"""Examples by benchmark and task: from the Hub, from local files in kvpress' schema, or generated."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
from datasets import load_dataset

from kvpress_prob.examples.generator import MAKERS, generate_examples
from kvpress_prob.examples.tables import checked_table, read_table
from kvpress_prob.examples.tasks import ANSWERS, BENCHMARKS, HUB, TASKS
from kvpress_prob.records import Benchmark, Example

CountTokens = Callable[[str], int]


def load_examples(
    benchmark: Benchmark,
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
        wanted = tasks or list(MAKERS)
        examples = [example for task in wanted for example in generate_examples(task, n, length, count_tokens, seed)]
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


def _from_hub(benchmark: Benchmark, tasks: list[str] | None, length: int) -> pd.DataFrame:
    folders = [str(length)] if benchmark == "ruler" else list(tasks or TASKS[benchmark])
    tables = [load_dataset(HUB[benchmark], data_dir=folder, split="test").to_pandas() for folder in folders]
    return pd.concat(cast(list[pd.DataFrame], tables), ignore_index=True)


def _examples(benchmark: Benchmark, table: pd.DataFrame, name: str, tasks: list[str] | None) -> list[Example]:
    table = checked_table(benchmark, table, name)
    present = list(dict.fromkeys(table["task"]))
    for task in tasks or present:
        if task not in present:
            raise ValueError(f"tasks must be among {present} of '{name}', got {task!r}")
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
                    answers=row[ANSWERS[benchmark]],
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
