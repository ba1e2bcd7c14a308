"""Random sequences of operations on a compressed cache against the oracle; found cases are kept as plain tests."""

import pytest
from hypothesis import settings

from tests.helpers.machine import CompressedCacheMachine

TestCompressedCache = pytest.mark.filterwarnings("ignore:every layer of")(CompressedCacheMachine.TestCase)
TestCompressedCache.settings = settings(max_examples=100, stateful_step_count=12, deadline=None, derandomize=True)
