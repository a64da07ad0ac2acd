"""Calls of an operator raise if the C++ object of its library was reset."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.devices import BACKEND

pytestmark = needs_native

T = torch.ones(2)
SCHEMA = "(Tensor x) -> Tensor"


@pytest.fixture(autouse=True)
def _accelerated(namespace):
    # Ignore the warning that nothing matches the pattern, because the tests define operators later.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torchop.NothingToAccelerateWarning)
        acceleration = torchop.accelerate(f"{namespace}::*")
    with acceleration:
        yield


def theirs(namespace: str) -> tuple[Any, list[Any]]:
    """Define an operator with torch.library. Return its library, and its packet and overload."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"op{SCHEMA}")
    library.impl("op", lambda x: x + 1, BACKEND)
    packet = getattr(torch.ops, namespace).op
    return library, [packet, packet.default]


def made_by_custom_op(namespace: str) -> tuple[Any, list[Any]]:
    op = torch.library.custom_op(
        f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema=SCHEMA
    )
    packet = getattr(torch.ops, namespace).op
    return op._lib, [op, packet, packet.default]


def of_a_library(namespace: str) -> tuple[Any, list[Any]]:
    library = torchop.Library(namespace, "FRAGMENT")
    library.define(f"op{SCHEMA}")
    library.impl("op", lambda x: x + 1, BACKEND)
    packet = getattr(torch.ops, namespace).op
    return library, [packet, packet.default]


def ours(namespace: str) -> tuple[Any, list[Any]]:
    op = torchop.custom_op(f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema=SCHEMA)
    packet = getattr(torch.ops, namespace).op
    return op._definition.library, [op, packet, packet.default]


MAKERS = [theirs, made_by_custom_op, of_a_library, ours]


@pytest.mark.parametrize("make", MAKERS)
def test_a_held_operator_of_a_library_that_was_reset_is_refused(namespace, make):
    library, callers = make(namespace)
    for call in callers * 3:
        assert call(T).tolist() == [2, 2]
    assert torchop.native.counters(callers[-1])["native"] > 0
    library.m.reset()
    for call in callers * 3:
        with pytest.raises(
            torchop.OperatorGoneError, match=f"{namespace}::op was deregistered: .* reset"
        ):
            call(T)
        with torchop.native.disabled(), pytest.raises(torchop.OperatorGoneError):
            call(T)
    with pytest.raises(torchop.OperatorGoneError):
        callers[-1]()


@pytest.mark.parametrize("make", MAKERS)
def test_operator_that_reuses_the_name_is_independent(namespace, make):
    library, callers = make(namespace)
    for call in callers * 2:
        call(T)
    library.m.reset()
    again = torch.library.Library(namespace, "FRAGMENT")
    again.define("op(Tensor x, int n) -> Tensor")
    again.impl("op", lambda x, n: x * n, BACKEND, allow_override=True)
    packet, overload = callers[-2:]
    for _ in range(3):
        assert packet(T, 3).tolist() == [3, 3]
        with pytest.raises(torchop.OperatorGoneError):
            overload(T)
    with (
        torchop.testing.checking(),
        pytest.raises(torchop.OperatorGoneError),
    ):  # `checking` discards what was prepared for native calls
        overload(T)
    again._destroy()


def test_resetting_a_library_removes_only_its_kernels(namespace):
    library, (packet, _) = of_a_library(namespace)
    kernels = torch.library.Library(namespace, "IMPL")
    kernels.impl("op", lambda x: x + 5, "Meta")
    assert packet(T).tolist() == [2, 2]
    kernels.m.reset()
    assert packet(T).tolist() == [2, 2]
    library.close()


def test_an_operator_is_deregistered_during_a_call(namespace):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"op{SCHEMA}")
    is_last = False

    def kernel(x: Tensor) -> Tensor:
        if is_last:
            library.m.reset()
            gc.collect()
        return x + 1

    library.impl("op", kernel, BACKEND)
    op = getattr(torch.ops, namespace).op
    op(T), op(T)
    is_last = True
    assert op(T).tolist() == [2, 2]
    with pytest.raises(torchop.OperatorGoneError):
        op(T)
