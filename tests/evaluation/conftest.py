"""One tiny model and data file for all evaluation tests."""

from pathlib import Path

import pytest
from transformers.utils import logging

from kvpress_prob.evaluation.models import load_pipeline
from tests.helpers.evaluation import ruler_rows, save_tiny_model, write_rows


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars():
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def pipe(model_folder):
    return load_pipeline(str(model_folder))


@pytest.fixture(scope="session")
def ruler_file(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", ruler_rows())
