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
    """Return a function that accelerates the namespace's operators until the test ends."""
    accelerations: list[torchop.Acceleration] = []

    def accelerate() -> torchop.Acceleration:
        accelerations.append(torchop.accelerate(f"{namespace}::*"))
        return accelerations[-1]

    yield accelerate
    for acceleration in accelerations:
        acceleration.undo()


@pytest.fixture
def library(namespace: str) -> Iterator[torch.library.Library]:
    library = torch.library.Library(namespace, "FRAGMENT")
    yield library
    # `Library._destroy` deletes the packet once for each overload in this list. At the second
    # overload, PyTorch would look the packet up again and read freed memory. So leave only one
    # overload of each packet in the list.
    one_of_each = {name.partition(".")[0]: name for name in library._op_defs}
    library._op_defs = set(one_of_each.values())
    library._destroy()


@pytest.fixture
def op(namespace: str) -> Any:
    def op(x: Tensor) -> Tensor:
        return x + 1

    return stock(namespace, op)


@pytest.fixture
def seen() -> list[Any]:
    return []
