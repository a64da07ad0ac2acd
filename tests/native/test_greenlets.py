"""Greenlets that switch inside kernels."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.devices import BACKEND
from tests._support.free_threads import HAS_GIL, needs_greenlets

if HAS_GIL:  # without the GIL, the tests are expected to fail, so don't skip them
    greenlet = pytest.importorskip("greenlet")

pytestmark = [needs_native, needs_greenlets]

T = torch.zeros(2)


def switching(namespace: str, name: str, switch: Callable[[], Any]) -> Any:
    """Define an operator, call it once, and let its kernel call `switch` from then on."""
    is_prepared = False

    def kernel(x: Tensor) -> Tensor:
        if is_prepared:
            switch()
        return x + 1

    op = torchop.custom_op(
        f"{namespace}::{name}", kernel, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op(T)
    is_prepared = True
    return op


def deep(depth: int, call: Callable[[], Any]) -> Any:
    """Run `call` inside `depth` nested C calls, so that it uses a different part of the C stack."""
    return call() if depth == 0 else functools.partial(deep, depth - 1, call)()


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)])
def test_calls_may_end_in_any_order(namespace, order):
    main = greenlet.getcurrent()
    ops = [switching(namespace, f"op{number}", main.switch) for number in range(3)]
    greenlets = [greenlet.greenlet(lambda op=op: deep(5, lambda: op(T))) for op in ops]
    for started in greenlets:
        started.switch()
    for number in order:
        greenlets[number].switch()
    assert all(ended.dead for ended in greenlets)


def test_an_operator_is_deregistered_while_greenlets_call_it(namespace):
    library = torchop.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    main, is_prepared = greenlet.getcurrent(), False

    def kernel(x: Tensor) -> Tensor:
        if is_prepared:
            main.switch()
        return x + 1

    library.impl("op", kernel, BACKEND)
    op = getattr(torch.ops, namespace).op
    op(T)
    is_prepared = True
    results = []
    first, second = (
        greenlet.greenlet(lambda: deep(5, lambda: results.append(op(T)))) for _ in "ab"
    )
    first.switch()
    second.switch()
    library.close()
    for waiting in (first, second):
        waiting.switch()
    assert [result.tolist() for result in results] == [[1, 1], [1, 1]]
    with pytest.raises(torchop.OperatorGoneError):
        op(T)


def test_a_greenlet_that_is_killed_ends_its_call(namespace):
    op = switching(namespace, "op", greenlet.getcurrent().switch)
    started = greenlet.greenlet(lambda: op(T))
    started.switch()
    before = sys.getrefcount(op)
    del started
    assert sys.getrefcount(op) <= before


def test_many_greenlets_are_in_a_kernel_at_once(namespace):
    op = switching(namespace, "op", greenlet.getcurrent().switch)
    started = [greenlet.greenlet(lambda depth=i % 7: deep(depth, lambda: op(T))) for i in range(99)]
    for one in started:
        one.switch()
    for one in started[::2] + started[1::2]:
        one.switch()
    assert all(one.dead for one in started)
