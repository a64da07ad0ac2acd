"""Define the operators of a case, one per route."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchop
from _cases import Case
from _harness import Call

ROUTES = PLAIN, HANDLE, OPS, CUSTOM_OP, LOW_LEVEL, CPP, WRITTEN = (
    "plain call",
    "torchop handle",
    "torch.ops",
    "custom_op",
    "define + impl",
    "C++ op",
    "autograd.Function",
)


class Row(NamedTuple):
    """The calls of one row.

    Attributes:
        title: the title of the row.
        calls: the calls to time, by route.
        handle: torchop's operator.
        ways: the counters of `torchop.native` that a call of `handle` increments.
        repeats: how often each of `calls` calls the operator.
    """

    title: str
    calls: Mapping[str, Call]
    handle: Any
    ways: tuple[str, ...] = ("native",)
    repeats: int = 1


def row(case: Case, *, cpp: bool) -> Row:
    """Define the operators of a case.

    Args:
        case: the function, the rules and the arguments.
        cpp: whether the operators of clone_first.cpp are loaded.
    """
    name, function = case.name, case.function
    low_level = f"bench_low_level::{name}"
    tags = tuple(getattr(torch.Tag, tag) for tag in case.tags)
    options: dict[str, Any] = {"mutates_args": case.mutates_args, "tags": tags}
    ours = torchop.custom_op(f"bench_torchop::{name}", function, **options)
    stock = torch.library.custom_op(f"bench_custom_op::{name}", function, **options)
    torch.library.define(low_level, torchop.infer_schema(function, **options), tags=tags)
    torch.library.impl(low_level, "cpu", function)
    if case.formula is not None:
        backward, setup_context = case.formula
        ours.register_autograd(backward, setup_context=setup_context)
        for op in (stock, low_level):
            torch.library.register_autograd(op, backward, setup_context=setup_context)
    functions: dict[str, Callable[..., Any]] = {
        PLAIN: function,
        HANDLE: ours,
        OPS: ours.overload,
        CUSTOM_OP: stock,
        LOW_LEVEL: getattr(torch.ops.bench_low_level, name).default,
    }
    if cpp and case.cpp is not None:
        functions[CPP] = getattr(torch.ops.bench_cpp, case.cpp).default
    if case.written is not None:
        functions[WRITTEN] = case.written.apply
    if case.backward:
        functions = {route: _and_backward(function) for route, function in functions.items()}
    args, kwargs = case.arguments()
    calls = {route: Call(function, args, kwargs) for route, function in functions.items()}
    return Row(case.title, calls, ours, case.ways)


def _and_backward(function: Callable[..., Tensor]) -> Callable[..., None]:
    gradient = torch.ones(4)

    def step(*args: Tensor) -> None:
        function(*args).backward(gradient)

    return step
