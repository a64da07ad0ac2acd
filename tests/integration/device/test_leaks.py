"""Calls on a device leak nothing."""

from __future__ import annotations

import os

import pytest

from tests.native import test_leaks as leaks
from tests.native.test_leaks import (  # noqa: F401  # tests
    ops,
    pytestmark,
    test_backward_passes,
    test_calls,
    test_calls_that_raise,
    test_plans_are_replaced_and_not_kept,
)


@pytest.fixture(autouse=True)
def fewer_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run on the CPU, which takes a hundred times as long."""
    if "TORCHOP_LEAK_CALLS" not in os.environ:
        monkeypatch.setattr(leaks, "CALLS", 500)
        monkeypatch.setattr(leaks, "SLOW_CALLS", 200)
