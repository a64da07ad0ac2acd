"""Accelerated calls run the kernel that the dispatcher would run. Uses private names."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests._support.devices import AUTOGRAD, BACKEND, OTHER, TYPE
from tests.accelerate.support import T, stock
from torchop._compat.dispatch import format_key

pytestmark = needs_native


def test_a_kernel_that_was_registered_later_runs(accelerated, op):
    accelerated()
    assert torch.equal(op(T), T + 1)
    op.register_kernel(TYPE)(lambda x: x + 2)
    assert torch.equal(op(T), T + 2)
    # A second registration replaces the Python function without changing the dispatcher. The next
    # call must run the new function anyway.
    op.register_kernel(TYPE)(lambda x: x + 3)
    assert torch.equal(op(T), T + 3)
    assert torch.equal(op(T), T + 3)
    assert torchop.native.counters(op) == {"native": 3, "kernel": 1}


def test_a_disabled_kernel_does_not_run(accelerated, op):
    op.register_kernel(TYPE)(lambda x: x + 2)
    accelerated()
    assert torch.equal(op(T), T + 2)
    with op.set_kernel_enabled(TYPE, enabled=False):
        assert torch.equal(op(T), T + 1)
    assert torch.equal(op(T), T + 2)
    assert torchop.native.counters(op) == {"native": 3}


def test_kernels_of_a_list_of_devices(namespace, accelerated):
    def op(x: Tensor) -> Tensor:
        return x + 1

    # With a list of device types, torch.library runs the kernel of the last type for all of them.
    # The accelerated call must do the same.
    handle = stock(namespace, op, device_types=[TYPE, OTHER])
    handle.register_kernel(TYPE)(lambda x: x + 2)
    before = handle(T)
    accelerated()
    assert torch.equal(handle(T), before)
    assert torchop.native.counters(handle) == {"native": 1}
    handle.register_kernel(OTHER)(lambda x: x + 3)
    assert torch.equal(handle(T), T + 3)


@pytest.mark.parametrize("has_formula", [True, False])
def test_a_kernel_that_a_library_put_in_place_of_a_custom_ops_runs(
    namespace, accelerated, op, has_formula
):
    if has_formula:
        op.register_autograd(lambda ctx, grad: grad * 3)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.impl("op", lambda x: x + 2, BACKEND)
    assert accelerated().operators[0].accelerated
    x = T.clone().requires_grad_()
    for call in (op, getattr(torch.ops, namespace).op):
        assert torch.equal(call(T), T + 2)
        y = call(x)
        assert torch.equal(y, T + 2)
        if has_formula:
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full_like(T, 3))
        else:
            with pytest.raises(RuntimeError, match="no autograd formula"):
                y.sum().backward()
    assert torchop.native.counters(op) == {"native": 4}
    library._destroy()
    assert torch.equal(op(T), T + 1)


@pytest.mark.parametrize("is_older", [True, False])
def test_override_runs_before_and_after_acceleration(namespace, accelerated, op, is_older):
    if not is_older:
        accelerated()
        assert torch.equal(op(T), T + 1)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.impl("op", lambda x: x, BACKEND)  # a kernel of a Library may return its input
    accelerated()
    assert op(T) is T
    assert op(T) is T
    library._destroy()
    assert torch.equal(op(T), T + 1)
    assert torch.equal(op(T), T + 1)
    assert torchop.native.counters(op)["native"] >= 2


AUTOCAST = f"Autocast{BACKEND}"


@pytest.mark.parametrize("key", [AUTOGRAD, "ADInplaceOrView", AUTOCAST, "BackendSelect"])
def test_kernel_that_takes_keys_is_dispatched(accelerated, library, op, key):
    library.impl("op", lambda keys, x: x + 5, key, with_keyset=True)
    with torch.autocast(TYPE, enabled=key == AUTOCAST):
        before = op(T)
        accelerated()
        assert torch.equal(op(T), before)
    assert torch.equal(before, T + 5) or key == "BackendSelect"


def test_kernels_of_a_library(namespace, accelerated, library):
    library.define("op(Tensor x, int y=2) -> Tensor")
    library.define("op.two(Tensor x, Tensor y) -> Tensor")
    library.define("with_keys(Tensor x, int y=2) -> Tensor")
    library.define("composite(Tensor x) -> Tensor")
    library.define("empty(Tensor x) -> Tensor")
    library.impl("op", lambda x, y=2: x + y, BACKEND)
    library.impl("op.two", lambda x, y: x - y, BACKEND)
    # Without the dispatch keys, the other arguments would still fit this signature. So the result
    # shows whether the keys were passed.
    library.impl("with_keys", lambda keys, x=None, y=2: x * y, BACKEND, with_keyset=True)
    library.impl("composite", lambda x: x * 3, "CompositeImplicitAutograd")
    acceleration = accelerated()
    ops = getattr(torch.ops, namespace)
    assert torch.equal(ops.op.default(T), T + 2)
    assert torch.equal(ops.op(T, 3), T + 3)
    assert torch.equal(ops.op.two(T, T), T - T)
    assert torch.equal(ops.with_keys(T, 5), T * 5)
    x = T.clone().requires_grad_()
    ops.composite(x).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))
    with pytest.raises(NotImplementedError, match="Could not run"):
        ops.empty(T)
    assert torchop.native.counters(ops.op.default) == {"native": 2}
    assert torchop.native.counters(ops.op.two) == {"native": 1}
    assert torchop.native.counters(ops.composite) == {"native": 1}
    rows = {row.op: row for row in acceleration.operators}
    assert (
        rows[f"{namespace}::with_keys"].reason
        == f"its kernel for {format_key(BACKEND)} takes dispatch keys"
    )
    assert rows[f"{namespace}::empty"].reason == "none of its kernels is a Python function"
    assert rows[f"{namespace}::op.two"] == (f"{namespace}::op.two", True, "", ())


def test_wrapper_of_torch_library_impl_is_skipped(namespace, accelerated, seen):
    torch.library.define(f"{namespace}::op", "(Tensor x, int a=1) -> Tensor")

    @torch.library.impl(f"{namespace}::op", "default")
    def kernel(x, a=1):
        seen.append(sys._getframe(1).f_code.co_name)
        return x + a

    @torch.library.register_kernel(f"{namespace}::op", OTHER)
    def unused(x, a=1):
        raise AssertionError

    accelerated()
    op = getattr(torch.ops, namespace).op
    assert torch.equal(op(T), T + 1)
    assert torch.equal(op(T, 2), T + 2)
    assert set(seen) == {"test_wrapper_of_torch_library_impl_is_skipped"}
    assert torchop.native.counters(op) == {"native": 2}


def test_a_fallback_for_all_operators_is_no_kernel_of_this_one(namespace, accelerated):
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    everywhere = torch.library.Library("_", "IMPL")
    everywhere.fallback(lambda op, x: x + 9, "CPU")
    try:
        op = getattr(torch.ops, namespace).op
        x = torch.arange(4.0, device="cpu")
        before = op(x)
        acceleration = accelerated()
        assert torch.equal(op(x), before)
        assert acceleration.operators[0].reason.startswith("a fallback for all operators")
    finally:
        everywhere._destroy()
        library._destroy()
