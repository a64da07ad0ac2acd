"""Define, register, trace and redefine operators in many threads at once."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import THREADS, in_threads
from tests._support.devices import TYPE


@pytest.fixture(autouse=True)
def _switch_often() -> Iterator[None]:
    """Make Python switch between threads much more often, so that data races are more likely."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(interval)


# --------------------------------------------------------------------------------------------------
# Registering


def _define(namespace: str, number: int) -> torchop.CustomOp:
    """Define an operator with a kernel and rules whose results depend on `number`."""

    @torchop.custom_op(f"{namespace}::op{number}", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + number

    op.register_fake(lambda x: x.new_empty(x.shape[0] + number))
    op.register_autograd(lambda ctx, grad: grad * number)
    op.register_vmap(lambda info, in_dims, x: (x - number, in_dims[0]))
    op.register_kernel(TYPE, lambda x: x + 2 * number)
    return op


def test_operators_defined_in_eight_threads_have_their_own_rules(namespace):
    total = 200
    ops: dict[int, torchop.CustomOp] = {}

    def define_some(thread: int) -> None:
        for number in range(thread, total, THREADS):
            ops[number] = op = _define(namespace, number)
            assert op(torch.ones(1)).item() == 1 + 2 * number

    in_threads(define_some)
    assert sorted(ops) == list(range(total))
    packets = getattr(torch.ops, namespace)
    x = torch.ones(1, requires_grad=True)
    for number, op in ops.items():
        assert op.overload is getattr(packets, f"op{number}").default
        assert op(x).item() == 1 + 2 * number
        assert op(torch.empty(1, device="meta")).shape == (1 + number,)
        assert torch.autograd.grad(op(x), x)[0].item() == number
        assert torch.vmap(op)(torch.ones(2)).tolist() == [1.0 - number] * 2


def test_last_registration_of_eight_threads_applies(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 0

    last: list[int] = []
    lock = threading.Lock()

    def register_some(thread: int) -> None:
        for step in range(25):
            number = thread * 1000 + step
            with lock:
                last.append(number)
                op.register_kernel(TYPE, lambda x, number=number: torch.full_like(x, number))
                op.register_fake(lambda x, number=number: x.new_empty(number))
            # Each call must use the kernel of one registration, although other threads register
            # kernels meanwhile.
            assert op(torch.ones(2)).unique().numel() == 1

    in_threads(register_some)
    assert len(last) == 25 * THREADS
    assert op(torch.ones(1)).item() == last[-1]
    assert op(torch.ones(1, device="meta")).shape == (last[-1],)


def test_threads_that_define_the_same_operator_leave_exactly_one(namespace):
    def define(thread: int) -> torchop.CustomOp:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(8):
                op = torchop.custom_op(
                    f"{namespace}::contested",
                    lambda x: x + thread,
                    mutates_args=(),
                    schema="(Tensor x) -> Tensor",
                )
        return op

    handles = in_threads(define)
    alive = [op for op in handles if _outcome(op) != "gone"]
    assert len(alive) == 1
    value = getattr(torch.ops, namespace).contested(torch.zeros(1)).item()
    assert value == alive[0](torch.zeros(1)).item() == handles.index(alive[0])


def _outcome(op: Any) -> Any:
    try:
        return op(torch.zeros(1)).item()
    except torchop.OperatorGoneError:
        return "gone"


def test_rules_for_pytorchs_own_operators_can_be_registered_from_many_threads(namespace):
    with torchop.Library(namespace, "FRAGMENT") as library:
        for number in range(64):
            library.define(f"op{number}(Tensor x) -> Tensor")

        def register_some(thread: int) -> None:
            for number in range(thread, 64, THREADS):
                name = f"{namespace}::op{number}"
                torchop.register_kernel(name, TYPE, lambda x, n=number: x + n, lib=library)
                torchop.register_autograd(name, lambda ctx, g, n=number: g * n, lib=library)

        in_threads(register_some)
        x = torch.ones(1, requires_grad=True)
        for number in range(64):
            result = getattr(getattr(torch.ops, namespace), f"op{number}")(x)
            assert result.item() == 1 + number
            assert torch.autograd.grad(result, x)[0].item() == number


# --------------------------------------------------------------------------------------------------
# Tracing


def test_the_first_gradient_may_be_recorded_by_many_threads_at_once(namespace):
    for number in range(20):
        op = _define(namespace, number)

        def differentiate(thread: int, op: Any = op) -> float:
            x = torch.ones(1, requires_grad=True)
            return torch.autograd.grad(op(x), x)[0].item()

        assert in_threads(differentiate) == [number] * THREADS
