"""Generated calls on a device, both ways; `make fuzz FUZZ=...` compares more."""

from __future__ import annotations

import os

import pytest

from tests.differential import test_differential as differential
from tests.differential.test_differential import (  # noqa: F401  # tests
    test_native_calls_do_what_the_dispatcher_does,
    workshop,
)


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    if "TORCHOP_FUZZ_EXAMPLES" not in os.environ:
        monkeypatch.setattr(differential, "EXAMPLES", 400)
