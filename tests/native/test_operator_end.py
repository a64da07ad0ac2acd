"""Operators that are redefined or closed, sometimes during native calls."""

from __future__ import annotations

import contextlib
import gc
import threading

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import adding, needs_native

pytestmark = needs_native

T = torch.zeros(2)


@pytest.mark.parametrize(
    "way", [lambda op: op, lambda op: op.overload, lambda op: op.overload.overloadpacket]
)
@pytest.mark.parametrize("local", ["op", "op.other"])
@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize("place", ["kernel", "setup_context", "formula"])
def test_a_call_that_closes_its_library_finishes(namespace, way, local, is_native, place):
    library = torchop.Library(namespace, "FRAGMENT")
    closing = False

    def run(here: str) -> None:
        if closing and here == place:
            library._destroy()
            gc.collect()

    def kernel(x: Tensor) -> Tensor:
        run("kernel")
        return x + 1

    def backward(ctx, grad: Tensor) -> Tensor:
        run("formula")
        return grad * 3

    op = torchop.custom_op(f"{namespace}::{local}", kernel, mutates_args=(), lib=library)
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: run("setup_context"))
    call, x = way(op), T.clone().requires_grad_(place != "kernel")
    call(x)
    closing = True
    with contextlib.nullcontext() if is_native else torchop.native.disabled():
        y = call(x)
    assert y.tolist() == [1, 1]
    if place != "kernel":
        y.sum().backward()
        assert x.grad.tolist() == [3, 3]
    with pytest.raises(torchop.OperatorGoneError, match="was closed"):
        op(x)


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
        library._destroy()
        for thread in threads:
            thread.join(30)
    assert unexpected == []
