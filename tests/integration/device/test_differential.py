"""Compare native and dispatched calls of generated operators on a device.

`nox -s fuzz` compares more examples.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.integration.device import target
from tests.integration.differential import test_differential as differential
from tests.integration.differential.describe import Names, describe
from tests.integration.differential.observe import differences
from tests.integration.differential.test_differential import (  # noqa: F401  # collects these tests
    test_native_calls_equal_dispatched_calls,
    workshop,
)


@pytest.fixture(autouse=True)
def fewer_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    if "TORCHOP_FUZZ_EXAMPLES" not in os.environ:
        monkeypatch.setattr(differential, "EXAMPLES", 400)


@target.only_on_the_standin
def test_contents_of_memory_that_the_host_cannot_read_are_compared():
    one, other = (
        describe(torch.full((2,), number, device="standin"), Names()) for number in (1.0, 2.0)
    )
    assert [line.partition(":")[0] for line in differences(one, other)] == ["/contents"]
