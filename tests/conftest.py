"""Fixtures and settings for all tests."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _quiet_and_seeded():
    """Every test starts from the same global random state and leaves gradients off; two threads, as CI has."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)
