"""Registrations and deletions during a call. Uses private names."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import counting, needs_native
from tests._support.devices import TYPE
from tests.native.scenarios import GRAD, T, define, inputs
from torchop._native import switch

pytestmark = needs_native


@GRAD
def test_kernel_may_replace_itself(namespace, with_grad):
    def kernel(x: Tensor) -> Tensor:
        op.register_kernel(TYPE, lambda x: x + 5)
        gc.collect()
        return x + 1

    op = define(namespace, kernel)
    op.register_autograd(lambda ctx, grad: grad)
    x = inputs(with_grad)
    op.register_kernel(TYPE, lambda x: x + 3)
    op(x)
    op.register_kernel(TYPE, kernel)
    with counting(op) as calls:
        assert op(x).tolist() == [1, 1]
        assert op(x).tolist() == [5, 5]
    assert calls == {"native": 2}


def test_setup_context_may_replace_the_formula(namespace):
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        op.register_autograd(lambda ctx, grad: grad * 3)
        gc.collect()

    op = define(namespace, lambda x: x + 1)
    x = inputs(True)
    op.register_autograd(lambda ctx, grad: grad)
    op(x)
    op.register_autograd(lambda ctx, grad: grad, setup_context=setup_context)
    y = op(x)
    y.sum().backward()
    # The backward uses the formula that `setup_context` registered during the call.
    assert x.grad.tolist() == [3, 3]


def test_kernel_may_drop_the_last_reference_to_the_handle_that_calls_it(namespace):
    """A running call must keep the native objects that it uses alive, even without a handle."""

    def kernel(x: Tensor) -> Tensor:
        handles.clear()
        gc.collect()
        return x + 1

    op = define(namespace, kernel)
    for recreate in range(20):
        handle = torchop.CustomOp(op._definition)
        switch.native_module().adopt(handle, op._definition.entry)
        handles = [handle]
        reference = weakref.ref(handle)
        del handle
        assert handles.pop()(T).tolist() == [1, 1], recreate
        assert reference() is None


def test_arguments_that_the_caller_drops_live_through_the_call(namespace):
    def kernel(xs: list[Tensor]) -> Tensor:
        outside.clear()
        gc.collect()
        return xs[0] + xs[1]

    op = define(namespace, kernel, "(Tensor[] xs) -> Tensor")
    outside = [torch.ones(2), torch.ones(2)]
    assert op(outside).tolist() == [2, 2]
    assert outside == []


def test_other_thread_registers_during_calls(namespace):
    op = define(namespace, lambda x: x + 1)
    op.register_autograd(lambda ctx, grad: grad)
    unexpected, stop = [], threading.Event()

    def call():
        x, y = torch.zeros(2), torch.zeros(2, requires_grad=True)
        while not stop.is_set():
            for argument in (x, y):
                result = op(argument).tolist()
                if result[0] not in (1, 2, 3) or result[0] != result[1]:
                    unexpected.append(result)

    threads = [threading.Thread(target=call) for _ in range(2)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        op.register_kernel(TYPE, lambda x: x + 2)
        op.register_kernel(TYPE, lambda x: x + 3)
        op.register_autograd(lambda ctx, grad: grad)
        with op.set_kernel_enabled(TYPE, enabled=False):
            time.sleep(0.0005)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert unexpected == []
    assert torchop.native.counters(op)["native"] > 100


def looked_up(namespace, way):
    packet = getattr(torch.ops, namespace).op
    return packet if way == "packet" else packet.default


UNARY = "(Tensor x) -> Tensor"
WAYS = pytest.mark.parametrize("way", ["packet", "default"])


@WAYS
@pytest.mark.parametrize("defined_again", [False, True])
def test_object_that_torch_ops_no_longer_refers_to(namespace, way, defined_again):
    """An object that torch.ops dropped must not call a deregistered operator.

    If two threads look up a name at the same time, both create an object, but torch.ops keeps only
    one of them, so programs can hold an object that torch.ops no longer refers to.
    """
    library = torchop.Library(namespace, "FRAGMENT")
    torchop.custom_op(
        f"{namespace}::op", lambda x: x + 1, mutates_args=(), schema=UNARY, lib=library
    )
    called = looked_up(namespace, way)
    hashed = hash(called)
    if way == "packet":
        delattr(getattr(torch.ops, namespace), "op")
    else:
        delattr(looked_up(namespace, "packet"), "default")
    library.close()
    if defined_again:
        define(namespace, lambda x: x + 2)
    for _ in range(2):
        with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}::op was deregistered"):
            called(T)
        assert hash(called) == hashed


def test_redefinition_keeps_operators_of_other_libraries(namespace):
    """An overload stays usable if one library defined it and another registered its kernel.

    While the kernel is registered, the dispatcher keeps the operator's entry, although the schema's
    library is closed and a new one defines the operator again.
    """
    define(namespace, lambda x: x + 1)
    kernels = torch.library.Library(namespace, "FRAGMENT")
    schema = torch.library.Library(namespace, "FRAGMENT")
    schema.define("theirs(Tensor x) -> Tensor")
    kernels.impl("theirs", lambda x: x + 2, "CompositeExplicitAutograd")
    packet = getattr(torch.ops, namespace).theirs
    called = [packet, packet.default]
    assert [each(T).tolist() for each in called] == [[2, 2]] * 2
    schema._destroy()
    schema = torch.library.Library(namespace, "FRAGMENT")
    schema.define("theirs(Tensor x) -> Tensor")
    assert [each(T).tolist() for each in called] == [[2, 2]] * 2
    kernels._destroy()
    schema._destroy()


def test_threads_get_their_own_results(namespace):
    op = define(
        namespace, lambda x, xs, n=1: x + xs[0] + n, "(Tensor x, Tensor[] xs, int n=1) -> Tensor"
    )
    wrong = []

    def work(number):
        x, xs, expected = torch.full((1,), float(number)), [torch.full((1,), 10.0)], number + 11.0
        for _ in range(20_000):
            result = op(x, xs).item()
            if result != expected:
                wrong.append((number, result))

    with counting(op) as calls:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert wrong == []
    assert calls == {"native": 80_000}
