"""Fixtures and settings for all tests."""

import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Triton reads it when it is first imported, and importing kvpress does that.
    os.environ["TRITON_INTERPRET"] = "1"

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    """Every test starts from the same global random state, without gradients, on one thread: two workers share the
    cores."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


@pytest.fixture(params=[1, 2, 3], ids="threads{}".format)
def threads(request) -> int:
    """Number of torch's threads; the CPU path splits every segment into as many parts."""
    torch.set_num_threads(request.param)
    return request.param


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _surrogates_for_tiny_models():
    """Nobody has fitted surrogates to the random models of the tests: presses find random ones."""
    from tests.helpers.surrogates import find_or_make_surrogate

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvpress_prob.presses.surrogate_press.find_surrogate", find_or_make_surrogate)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_progress_bars():
    from transformers.utils import logging  # after the variable above

    logging.disable_progress_bar()


@pytest.fixture(autouse=True)
def _attention_pattern(monkeypatch):
    """DuoAttention's patterns are downloads: one for two layers of two heads instead."""
    import numpy as np
    from kvpress import DuoAttentionPress

    pattern = 4, 16, np.array([[0.1, 0.9], [0.8, 0.2]])
    monkeypatch.setattr(DuoAttentionPress, "load_attention_pattern", staticmethod(lambda model: pattern))


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer."""
    from tests.helpers.evaluation import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def pipe(model_folder):
    """kvpress' pipeline around it."""
    from kvpress_prob.models.loading import load_pipeline

    return load_pipeline(str(model_folder))


@pytest.fixture(scope="session")
def ruler_file(tmp_path_factory) -> Path:
    """Data in kvpress' schema for it."""
    from tests.helpers.evaluation import ruler_rows, write_rows

    return write_rows(tmp_path_factory.mktemp("data") / "rows.jsonl", ruler_rows())
