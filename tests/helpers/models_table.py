"""Writes ``docs/models.md`` from the models that the tests run: ``python -m tests.helpers.models_table``."""

from importlib.metadata import version
from pathlib import Path

import transformers

from tests.helpers.models import ARCHITECTURES, REFUSED, UNREADABLE

PATH = Path(__file__).parents[2] / "docs" / "models.md"

PAGE = """\
# Models

Written by `make models-table` from what `tests/hf/test_models.py` runs; a test fails when it is out of date.

Any decoder that uses transformers' attention interface with `sdpa` or `eager` attention should work: queries are
recorded where the model hands them to its attention function, and no model's code is repeated here.

## Tested

Random weights, transformers {version}. Each row, with `sdpa` and with `eager`: a compressed context, a question and
further tokens against float32 attention over the whole cache with the weights as a bias; `generate()` against the
plain greedy loop; a left-padded batch against its rows alone. Layers that slide are left as they are.

| family | class | compressed layers | attention |
|---|---|---|---|
{tested}

Query heads per KV head: 1, 3, 4, 8, 16. Widths of a head: 16, 48, 64, 80, 96, 128, 256. A decoder inside a multimodal
model: Gemma 3.

## Scorers of kvpress

Some compute queries themselves, by parts of an attention module that not every family has. With them a
`ProbabilisticPress` fails where kvpress fails. This package's own scorers, KeyDiff, K-norm and StreamingLLM read every
family above.

| family | what fails in kvpress {kvpress} |
|---|---|
{unreadable}

## Refused

With one `TypeError`, before anything is compressed.

| family | class | the error says |
|---|---|---|
{refused}
"""


def text() -> str:
    """The page as it should be; ``tests/hf/test_models.py`` compares."""
    tested = [
        f"| {name} | `{it.model}` | {' and '.join(map(str, it.compressed)) or 'none'} of 0 and 1 | {it.note} |"
        for name, it in ARCHITECTURES.items()
    ]
    refused = [f"| {name} | `{it.model}` | {error} |" for name, (it, error) in REFUSED.items()]
    unreadable = [f"| {name} | {', '.join(UNREADABLE[name])} |" for name in ARCHITECTURES if name in UNREADABLE]
    return PAGE.format(
        version=transformers.__version__,
        kvpress=version("kvpress"),
        tested="\n".join(tested),
        unreadable="\n".join(unreadable),
        refused="\n".join(refused),
    )


if __name__ == "__main__":
    PATH.parent.mkdir(exist_ok=True)
    PATH.write_text(text())
