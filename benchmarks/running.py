"""What the CPU benchmarks share: options, texts, models, interleaved timing, and JSON lines with versions."""

import argparse
import platform
import statistics
import time
from collections.abc import Callable, Hashable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any, TypeVar, cast

import pandas as pd
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from kvpress_prob.models.loading import load_pipeline
from kvpress_prob.records import git_commit, text_hash, to_line, versions

Key = TypeVar("Key", bound=Hashable)
RESULTS = Path(__file__).parent / "results"
CHAPTERS = (
    "specialnames", "compound", "types", "formatstrings", "debugger",
    "string-methods", "typesseq", "typesmapping", "comparisons", "assignment",
)  # fmt: skip
"""Long chapters of the Python reference, which every Python carries: running English that nobody has to download."""


def options(name: str, doc: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser with the options of every benchmark; ``defaults`` replace their defaults."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-demo", help="Hub name or folder (default: the demo model)")
    parser.add_argument("--text", type=Path, nargs="+", metavar="FILE", help="text files (default: Python's reference)")
    parser.add_argument("--tokens", type=int, default=2048, help="length of a context (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed of what is drawn (default: %(default)s)")
    parser.add_argument("--output", type=Path, nargs="?", const=RESULTS / f"{name}.jsonl",
                        help="write JSON lines, by default to benchmarks/results")  # fmt: skip
    parser.set_defaults(**defaults)
    return parser


def load(model: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by name or folder."""
    disable_progress_bar()
    pipe = load_pipeline(model)
    return pipe.model, cast(PreTrainedTokenizerBase, pipe.tokenizer)


def read_texts(files: list[Path] | None) -> dict[str, str]:
    """Texts by name: the given files, or the chapters of the Python reference."""
    if files is None:
        return {f"python {platform.python_version()}, {name}": topics[name] for name in CHAPTERS}
    return {file.name: file.read_text(encoding="utf-8") for file in files}


def token_ids(tokenizer: Any, texts: dict[str, str], tokens: int) -> dict[str, Tensor]:
    """The first ``tokens`` tokens [1, n] of each text that has so many.

    Raises
    ------
    ValueError
        If no text is long enough.
    """
    encoded = {name: tokenizer(text, return_tensors="pt", verbose=False).input_ids for name, text in texts.items()}
    long_enough = {name: ids[:, :tokens] for name, ids in encoded.items() if ids.shape[1] >= tokens}
    if not long_enough:
        longest = max(ids.shape[1] for ids in encoded.values())
        raise ValueError(f"texts must have at least {tokens} tokens, got at most {longest}")
    return long_enough


def interleaved(functions: dict[Key, Callable[[], object]], rounds: int) -> dict[Key, list[float]]:
    """Milliseconds of every function in each round; all of them run once in a round, after an untimed one."""
    times: dict[Key, list[float]] = {name: [] for name in functions}
    for number in range(rounds + 1):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            if number:
                times[name].append(1e3 * (time.perf_counter() - begin))
    return times


def medians(times: dict[Key, list[float]]) -> dict[Key, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def write(output: Path | None, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Rows as JSON lines, each with what it depends on: settings, texts, versions, machine."""
    if output is None:
        return
    environment = {
        "settings": {
            name: value.name if isinstance(value, Path) else value
            for name, value in vars(arguments).items()
            if name not in ("text", "output")
        },
        "texts": {name: text_hash(text) for name, text in read_texts(arguments.text).items()},
        "versions": versions(),
        "git_commit": git_commit(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text("".join(to_line({**row, **environment}) for row in rows), encoding="utf-8")
    print(f"{len(rows)} rows in {output}")


def show(title: str, table: pd.DataFrame, decimals: int = 4) -> None:
    print(f"\n{title}\n{table.to_string(float_format=lambda value: f'{value:.{decimals}f}', na_rep='')}")
