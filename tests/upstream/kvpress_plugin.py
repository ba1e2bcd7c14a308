"""pytest plugin for kvpress' own tests: this package's presses join their matrix; what cannot run here is skipped.

Not part of this project's test run: ``run.py`` loads it in the folder of kvpress' sources, whose tests are a package
called ``tests`` as well.
"""

import os
import sys

import numpy as np
import pytest
import torch

from kvpress_prob import H2OPress, MinVariancePress, ProbabilisticPress

OUR_PRESSES = [
    {"cls": MinVariancePress, "kwargs": [{"compression_ratio": 0.2}, {"compression_ratio": 0.8}]},
    {"cls": H2OPress, "kwargs": [{"compression_ratio": 0.2}, {"compression_ratio": 0.8}]},
    {
        "cls": ProbabilisticPress,
        "kwargs": [
            {"press": MinVariancePress(), "compression_ratio": 0.2},
            {"press": H2OPress(), "compression_ratio": 0.8, "sampler": "multinomial", "correction": "counts"},
        ],
    },
]

HUB = "needs weights, statistics or patterns from the Hub or GitHub"
SKIPPED = {
    "test_pipeline_answer_is_correct": HUB,
    "test_pipeline_with_quantized_cache": HUB,
    "test_ea_with_stats.py": HUB,
    "test_load_attention_pattern": HUB,
    "test_load_qfilters": HUB,
    "ExpectedAttentionStatsPress": HUB,
    "QFilterPress": HUB,
}
"""Reasons by a part of a test's name."""
OUTERMOST = (NotImplementedError, "its budget is shared by all layers: it must be outermost")
POSITIONS = (ValueError, "ChunkPress does not say which positions a chunk's queries have")
FAILING = {
    "test_presses_run[ComposedPress-ProbabilisticPress]": OUTERMOST,
    "test_presses_run[ChunkPress-MinVariancePress]": POSITIONS,
    "test_presses_run[ChunkPress-H2OPress]": POSITIONS,
}
"""Error and reason by a part of a test's name. The run succeeds only if these tests fail, with this error, and no
other does."""


def pytest_configure(config: pytest.Config) -> None:
    sys.path.insert(0, os.getcwd())
    from tests.default_presses import default_presses

    default_presses.extend(OUR_PRESSES)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marks = {part: pytest.mark.skip(reason=reason) for part, reason in SKIPPED.items()}
    for part, (error, reason) in FAILING.items():
        marks[part] = pytest.mark.xfail(reason=reason, raises=error, strict=True)
    for part, mark in marks.items():
        meant = [item for item in items if part in item.nodeid]
        if not meant:
            raise pytest.UsageError(f"no test of kvpress is named {part}")
        for item in meant:
            item.add_marker(mark)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Many of kvpress' tests draw random tensors and set no seed."""
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name the matrix' rows after their press."""
    return val["cls"].__name__ if isinstance(val, dict) and "cls" in val else None
