"""Calls of an operator from a graph that Inductor compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor

import torchop
from _functions import CLONE_FIRST
from _harness import Call
from _routes import CUSTOM_OP, HANDLE, Row

CALLS = 10
TITLE = "Inductor graph"


def row() -> Row:
    """Compile a graph of `CALLS` calls, with an operator of torchop and one of torch.library."""
    # Compile workers in the background would disturb the measurement.
    torch._inductor.config.compile_threads = 1
    ours = torchop.custom_op("bench_torchop::compiled", CLONE_FIRST, mutates_args=())
    stock = torch.library.custom_op("bench_custom_op::compiled", CLONE_FIRST, mutates_args=())
    for op in (ours, stock):
        op.register_fake(_fake)
    xs = [torch.randn(4) for _ in range(14)]
    calls = {route: Call(_graph(op), xs) for route, op in ((HANDLE, ours), (CUSTOM_OP, stock))}
    return Row(TITLE, calls, ours, repeats=CALLS)


def _fake(x: Tensor, *others: Tensor) -> Tensor:
    return torch.empty_like(x)


def _graph(op: Callable[..., Tensor]) -> Callable[..., Any]:
    def graph(x: Tensor, *others: Tensor) -> Tensor:
        for _ in range(CALLS):
            x = op(x, *others)
        return x

    return torch.compile(graph, fullgraph=True)
