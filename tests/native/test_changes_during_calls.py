"""Registrations and deletions during a call. Uses private names."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

import torchop
from tests._support.common import counting, needs_native
from tests._support.devices import BACKEND, TYPE
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
@pytest.mark.filterwarnings("ignore::torchop.RedefinitionWarning")
@pytest.mark.parametrize("again", [False, True], ids=["first", "again"])
def test_a_definition_waits_for_the_first_call_of_an_object(namespace, way, again):
    """A redefinition must wait for a running call, even the first call of a torch.ops object.

    Before its first call, a torch.ops object has PyTorch's own function, which does not count
    running calls.
    """
    entered, release, order = threading.Event(), threading.Event(), []

    def blocking(x: Tensor) -> Tensor:
        entered.set()
        assert release.wait(20)
        torch.ops.aten.neg.default(x)  # a call of another torch.ops object
        time.sleep(0.05)
        order.append("left")
        return x + 1

    if again:  # let the same torch.ops object call an earlier operator first
        define(namespace, lambda x: x + 3)
        assert looked_up(namespace, way)(T).tolist() == [3, 3]
    define(namespace, blocking)
    thread = threading.Thread(target=looked_up(namespace, way), args=(T,))
    thread.start()
    assert entered.wait(20)
    timer = threading.Timer(0.1, release.set)
    timer.start()
    define(namespace, lambda x: x + 2)
    order.append("defined")
    thread.join()
    timer.join()
    assert order == ["left", "defined"]
    assert looked_up(namespace, way)(T).tolist() == [2, 2]


@WAYS
def test_operator_cannot_be_deregistered_during_the_first_call_of_an_object(namespace, way):
    def kernel(x: Tensor) -> Tensor:
        define(namespace, lambda x: x)
        return x + 1

    define(namespace, kernel)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be deregistered or replaced from inside"):
            looked_up(namespace, way)(T)


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
        if defined_again:
            assert called(T).tolist() == [2, 2]
        else:
            with pytest.raises(torchop.OperatorGoneError, match=f"{namespace}.* was deregistered"):
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


def test_new_object_at_a_freed_address_is_not_confused(namespace):
    """A new overload may have the address of a freed one, and must not be confused with it.

    The test simulates this by turning one object into another.
    """
    overload = OpOverload.__new__(OpOverload)
    with contextlib.suppress(AttributeError):
        overload(T)  # raises, because the object has no function yet
    op = define(namespace, lambda x: x + 1)
    theirs = torch.library.Library(f"{namespace}_theirs", "FRAGMENT")
    theirs.define("op() -> ()")
    theirs._destroy()
    vars(overload).update(vars(op.overload))
    overload._op, *_ = torch._C._get_operation_overload(f"{namespace}::op", "")
    assert overload(T).tolist() == [1, 1]
    assert isinstance(overload._op, switch.native_module().Operator)


@pytest.mark.parametrize(("fits", "gone"), [(False, True), (True, False)])
def test_an_overload_deregistered_while_a_packet_chooses_raises(namespace, fits, gone):
    """A packet that fails because its overload was deregistered must raise OperatorGoneError.

    If the call fails for another reason, the exception must stay unchanged.
    """
    entered, closed = threading.Event(), threading.Event()

    class Number:
        def __index__(self):
            entered.set()
            assert closed.wait(20)
            return 1 if fits else "no number"

    def kernel(x: Tensor, n: int) -> Tensor:
        raise RuntimeError("of the kernel")

    libraries = [torchop.Library(namespace, "FRAGMENT") for _ in range(2)]
    for library, name, kind in zip(libraries, ("first", "second"), ("int", "str"), strict=True):
        library.define(f"op.{name}(Tensor x, {kind} n) -> Tensor")
        library.impl(f"op.{name}", kernel, BACKEND)
    packet = getattr(torch.ops, namespace).op
    errors: list[Exception] = []

    def call():
        try:
            packet(T, Number())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert entered.wait(20)
    libraries[1].close()  # waits for the running call, but at most a second
    closed.set()
    thread.join()
    (error,) = errors
    assert isinstance(error, torchop.OperatorGoneError) == gone
    assert str(error) == (
        f"An overload of {namespace}::op was deregistered." if gone else "of the kernel"
    )
    libraries[0].close()


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
