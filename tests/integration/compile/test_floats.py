"""Compiled programs use the current value of a Python float, and not one from an earlier call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch._inductor.utils
from torch import Tensor
from torch.testing import assert_close

import torchop

# Maps the type of an argument to the argument's value for the float `s`.
ARGUMENTS: dict[str, Any] = {
    "float": lambda s: s * 2,
    "float?": lambda s: s * 2,
    "float[]": lambda s: [s * 2, 1.0],
    "Scalar": lambda s: s * 2,
    "complex": lambda s: complex(s * 2, 1.0),
    "bool": lambda s: s > 2,
}


@pytest.fixture
def _cached() -> Iterator[None]:
    with (
        torch._inductor.utils.fresh_cache(),
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        yield


@pytest.mark.usefixtures("_cached")
# After the second value, PyTorch compiles the program with a dynamic float anyway.
@pytest.mark.parametrize("dynamic", [None, pytest.param(True, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_float_that_also_takes_part_in_arithmetic(
    namespace: str, kind: str, dynamic: bool | None
) -> None:
    def shift(x: Tensor, value: Any) -> Tensor:
        return x + abs(sum(value) if isinstance(value, list) else value)

    op = torchop.custom_op(
        f"{namespace}::shift", shift, schema=f"(Tensor x, {kind} value) -> Tensor", mutates_args=()
    )
    op.register_fake(lambda x, value: torch.empty_like(x))

    def function(x: Tensor, s: float) -> Tensor:
        return op(x, ARGUMENTS[kind](s)) * s

    compiled = torch.compile(function, dynamic=dynamic)  # complex() breaks the graph
    for s in (1.5, 2.5, 3.5, 4.5):
        assert_close(compiled(torch.ones(2), s), function(torch.ones(2), s))
