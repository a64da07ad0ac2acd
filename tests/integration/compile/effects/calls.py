"""Programs that call operators with an effect. The operators add each call to `CALLS`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

CALLS: list[Any] = []
compiled_with = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def trained(function: Callable[[Tensor], Tensor]) -> tuple[Tensor, list[Any]]:
    CALLS.clear()
    x = torch.linspace(0.1, 0.5, 3, requires_grad=True)
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad, list(CALLS)


def nested_regions(log: Any, calls: int = 2) -> Callable[[Tensor], Tensor]:
    @torch.compiler.nested_compile_region
    def region(x: Tensor) -> Tensor:
        log(x, 1)
        return x.sin()

    def regions(x: Tensor) -> Tensor:
        for _ in range(calls):
            x = region(x)
        return x

    return regions
