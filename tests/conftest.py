"""Fixtures and settings for all tests."""

import os

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
