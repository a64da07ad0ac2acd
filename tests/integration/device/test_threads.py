"""Settings of the thread that calls `backward` apply in the backward threads of an accelerator."""

from __future__ import annotations

import contextvars
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.integration.device import target
from tests.integration.device.target import SECOND, TYPE

pytestmark = target.needs_accelerator
needs_context = pytest.mark.needs_torch("2.12", "backward has the context of its caller")


def calling_in_backward(namespace: str, call: Any) -> Tensor:
    op = torchop.custom_op(
        f"{namespace}::outer",
        lambda x: x * 1,
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )

    def backward(ctx: Any, grad: Tensor) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        return call(grad.clone())

    op.register_autograd(backward)
    return op(torch.ones(2, device=SECOND, requires_grad=True)).sum()


@needs_context
def test_checking_reports_mutation_in_backward(namespace):
    @torchop.custom_op(f"{namespace}::inner", mutates_args=())
    def inner(x: Tensor) -> Tensor:
        return x.add_(1).clone()

    y = calling_in_backward(namespace, inner)
    with torchop.testing.checking():
        with pytest.raises(torchop.UndeclaredMutationError, match="::inner: Arg"):
            y.backward(retain_graph=True)
        other = threading.Thread(target=y.backward, kwargs={"retain_graph": True})
        other.start()  # the block does not apply to this thread, so nothing raises
        other.join()
    y.backward()


def chosen(namespace: str) -> tuple[Any, list[str]]:
    """Define an operator with kernels of two additional providers, "first" and "second".

    Return the operator, and a list to which each kernel adds the name of its provider.
    """
    ran: list[str] = []

    def kernel(name: str) -> Any:
        def run(x: Tensor) -> Tensor:
            ran.append(name)
            return x * 2

        return run

    op = torchop.custom_op(
        f"{namespace}::inner", kernel("reference"), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    for name in ("first", "second"):
        op.register_kernel(TYPE, kernel(name), provider=name)
    return op, ran


@needs_context
@pytest.mark.parametrize("is_native", [True, False])
def test_backward_uses_the_callers_priority(namespace, is_native):
    op, ran = chosen(namespace)

    def call(grad: Tensor) -> Tensor:
        op(grad)
        with torchop.priority({f"{namespace}::inner": ["second"]}):
            op(grad)
        return torchop.native.disabled()(op)(grad) if not is_native else op(grad)

    y = calling_in_backward(namespace, call)
    with torchop.priority({f"{namespace}::inner": ["first"]}):
        y.backward(retain_graph=True)
        assert ran == ["first", "second", "first"]
        op(torch.ones(2, device=SECOND))
    ran.clear()
    y.backward(retain_graph=True)
    assert ran == ["reference", "second", "reference"]


@needs_context
def test_backward_uses_the_tasks_priority(namespace):
    op, ran = chosen(namespace)
    y = calling_in_backward(namespace, op)
    tasks = {name: contextvars.copy_context() for name in ("first", "second")}
    blocks = {name: torchop.priority({f"{namespace}::inner": [name]}) for name in tasks}
    for name, task in tasks.items():
        task.run(blocks[name].__enter__)
    for name, task in tasks.items():
        task.run(y.backward, retain_graph=True)
        task.run(blocks[name].__exit__)
        task.run(y.backward, retain_graph=True)
    assert ran == ["first", "reference", "second", "reference"]


@pytest.mark.parametrize("is_native", [True, False])
def test_nested_backward_loses_the_callers_priority(namespace, is_native):
    """A limitation: after a nested backward in a formula, PyTorch has lost the caller's context.

    So the priority that the caller has set does not apply to later calls in the formula.
    """
    op, ran = chosen(namespace)
    run = op if is_native else torchop.native.disabled()(op)

    def call(grad: Tensor) -> Tensor:
        with torch.enable_grad():
            torch.ones(2, device=SECOND, requires_grad=True).sum().backward()
        with torchop.testing.checking():
            return run(grad)

    with torchop.priority({f"{namespace}::inner": ["first"]}):
        calling_in_backward(namespace, call).backward()
    assert ran == ["reference"]


def test_native_calls_are_disabled_in_backward(namespace):
    op, _ = chosen(namespace)

    def call(grad: Tensor) -> Tensor:
        with torchop.native.disabled():
            op(grad)  # leaving this block must not end the caller's block
        return op(grad)

    y = calling_in_backward(namespace, call)
    backward = functools.partial(y.backward, retain_graph=True)
    with torchop.native.disabled():
        backward()
        other = threading.Thread(target=backward)
        other.start()  # the block does not apply to this thread, so its calls are native
        other.join()
        backward()
    backward()
    assert torchop.native.counters(op) == {"switched_off": 6, "native": 2}


def test_calls_in_backward_are_recorded(namespace):
    op, _ = chosen(namespace)
    y = calling_in_backward(namespace, op)
    with torchop.record(f"{namespace}::*") as recorded:
        y.backward()
    assert list(recorded) == [f"{namespace}::inner"]
