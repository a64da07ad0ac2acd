"""Fixtures for tests of acceleration: operators of torch.library, and accelerating them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.accelerate.support import stock


@pytest.fixture
def accelerated(namespace: str) -> Iterator[Callable[[], torchop.Acceleration]]:
    """Accelerate everything in the namespace until the test ends; return the object for it."""
    accelerations: list[torchop.Acceleration] = []

    def accelerate() -> torchop.Acceleration:
        accelerations.append(torchop.accelerate(f"{namespace}::*"))
        return accelerations[-1]

    yield accelerate
    for acceleration in accelerations:
        acceleration.undo()


@pytest.fixture
def library(namespace: str) -> Iterator[torch.library.Library]:
    """A library of torch.library's, until the test ends."""
    library = torch.library.Library(namespace, "FRAGMENT")
    yield library
    # PyTorch looks a packet up again for its second overload, when the operators of both ended,
    # and reads memory that was freed. So it is told of one.
    one_of_each = {name.partition(".")[0]: name for name in library._op_defs}
    library._op_defs = set(one_of_each.values())
    library._destroy()


@pytest.fixture
def op(namespace: str) -> Any:
    """An operator of torch.library's, which adds one."""

    def op(x: Tensor) -> Tensor:
        return x + 1

    return stock(namespace, op)


@pytest.fixture
def seen() -> list[Any]:
    """The arguments that a kernel or a formula got."""
    return []
