"""Operators that record gradients natively, and helpers that compare native and dispatched calls.

Uses private names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import torchop
from tests._support.common import counting
from torchop._rules.autograd.constants import Computed
from torchop._rules.autograd.rule import AutogradRule


def differentiable(
    namespace: str,
    kernel: Callable[..., Any],
    schema: str,
    backward: Callable[..., Any],
    setup_context: Callable[..., Any] | None = None,
) -> Any:
    """Define an operator and compile its autograd formula, so that its first call is native."""
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), schema=schema)
    op.register_autograd(backward, setup_context=setup_context)
    make_formula(op)
    return op


def make_formula(op: Any) -> None:
    """Compile the autograd formula, as the first call that records a gradient would."""
    rule = op._definition.rule(AutogradRule)
    assert rule.function
    if not rule.formula.computed:
        rule.formula.computed.append(Computed())
        rule.definition.outdate_plan()


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def leaf(*values: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values or (2.0,), requires_grad=True, dtype=dtype)


@contextlib.contextmanager
def all_native(op: Any) -> Iterator[None]:
    """Check that the block calls `op` at least once, and that all of these calls are native."""
    with counting(op) as calls:
        yield
    assert set(calls) == {"native"}, calls


def on_both_paths(op: Any, scenario: Callable[[], Any]) -> Any:
    """Run a scenario natively and through the dispatcher, and return the result.

    Both runs must have the same result, and must not raise.
    """
    with all_native(op):
        native = outcome(scenario)
    with counting(op) as calls, torchop.native.disabled():
        dispatched = outcome(scenario)
    assert set(calls) == {"switched_off"}
    assert native == dispatched
    if isinstance(native, Raised):
        raise AssertionError(f"{native}")
    return native


class Raised(tuple[type[BaseException], str]):
    """The type and the message of an exception, as a tuple that can be compared with another."""


def outcome(scenario: Callable[[], Any]) -> Any:
    try:
        return scenario()
    except Exception as error:
        return Raised((type(error), str(error)))


def error_on_both_paths(op: Any, scenario: Callable[[], Any]) -> tuple[type, str]:
    """Check that a scenario raises the same exception natively and through the dispatcher.

    Return the type and the message of the exception.
    """
    with all_native(op):
        native = outcome(scenario)
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    assert isinstance(dispatched, Raised), dispatched
    assert native == dispatched
    return native
