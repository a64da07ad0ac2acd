"""Operators that are redefined or closed, sometimes during native calls."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, counting, needs_native

pytestmark = needs_native

T = torch.zeros(2)


# Only the first attempt to close a library raises, so a test can call this function only once.
def assert_closing_is_refused(op, call):
    with counting(op) as calls, pytest.raises(RuntimeError, match="from inside a call to it"):
        call()
    assert calls == {"native": 1}


def assert_is_closed_later(op, library, x):
    """Check that the operator still works, and that its library can be closed later."""
    assert op(x).tolist() == [1, 1]
    library._destroy()
    with pytest.raises(torchop.OperatorGoneError, match="was closed"):
        op(x)


@pytest.mark.parametrize(
    "way", [lambda op: op, lambda op: op.overload, lambda op: op.overload.overloadpacket]
)
@pytest.mark.parametrize("local", ["op", "op.other"])
def test_library_is_not_closed_from_inside_a_native_call(namespace, way, local):
    library = torchop.Library(namespace, "FRAGMENT")
    closing = False

    def kernel(x: Tensor) -> Tensor:
        if closing:
            library._destroy()
        return x + 1

    op = torchop.custom_op(f"{namespace}::{local}", kernel, mutates_args=(), lib=library)
    way(op)(T)
    closing = True
    assert_closing_is_refused(op, lambda: way(op)(T))
    closing = False
    assert_is_closed_later(op, library, T)


def test_library_is_not_closed_from_inside_a_setup_context(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    closing = False

    def kernel(x: Tensor) -> Tensor:
        return x + 1

    def setup_context(ctx, inputs, output):
        if closing:
            library._destroy()

    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), lib=library)
    op.register_autograd(lambda ctx, grad: grad, setup_context=setup_context)
    x = T.clone().requires_grad_()
    op(x)
    closing = True
    assert_closing_is_refused(op, lambda: op(x))
    closing = False
    assert_is_closed_later(op, library, x)


def test_operators_are_closed_while_other_threads_call_them(namespace):
    """Each call must return a result or raise OperatorGoneError."""
    unexpected = []

    def work(op):
        while True:
            try:
                if op(T).tolist() != [1, 1]:
                    unexpected.append("result")
            except torchop.OperatorGoneError:
                return
            except BaseException as error:
                unexpected.append(error)
                return

    for number in range(30):
        library = torchop.Library(f"{namespace}_{number}", "FRAGMENT")
        op = adding(f"{namespace}_{number}", lib=library)
        threads = [threading.Thread(target=work, args=(op,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(50):
            op(T)
        with contextlib.suppress(RuntimeError):
            library._destroy()
        for thread in threads:
            thread.join(30)
    assert unexpected == []
