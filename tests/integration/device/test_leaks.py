from __future__ import annotations

import os

import pytest

from tests.native import test_leaks as leaks
from tests.native.test_leaks import (  # noqa: F401  # collects these tests
    ops,
    pytestmark,
    test_backward_passes,
    test_calls,
    test_calls_that_raise,
    test_replaced_plans_are_freed,
)


@pytest.fixture(autouse=True)
def fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make fewer calls, because falling back to the CPU makes kernels a hundred times slower."""
    if "TORCHOP_LEAK_CALLS" not in os.environ:
        monkeypatch.setattr(leaks, "CALLS", 500)
        monkeypatch.setattr(leaks, "SLOW_CALLS", 200)
