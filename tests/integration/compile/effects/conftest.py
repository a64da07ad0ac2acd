from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.utils
from torch import Tensor

import torchop
from tests.integration.compile.effects.calls import CALLS


@pytest.fixture(autouse=True)
def _no_calls() -> Iterator[None]:
    CALLS.clear()
    yield
    CALLS.clear()


@pytest.fixture
def cached() -> Iterator[None]:
    """Enable the compilers' caches on disk, and start with an empty folder."""
    with (
        torch._inductor.utils.fresh_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


@pytest.fixture
def log(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::log", mutates_args=(), effects="ordered")
    def log(x: Tensor, label: int) -> None:
        CALLS.append(label)

    return log


@pytest.fixture
def logged(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::logged", mutates_args=(), effects="ordered")
    def logged(x: Tensor, label: int) -> Tensor:
        CALLS.append(label)
        return x * 2

    logged.register_fake(lambda x, label: torch.empty_like(x))
    logged.register_autograd(lambda ctx, grad: (grad * 2, None))
    return logged
