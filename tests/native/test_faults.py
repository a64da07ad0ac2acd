"""Native calls that go wrong, or come in unusual numbers, leave everything whole."""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import sys
import threading
import time
import traceback
import weakref

import pytest
import torch
from torch import Tensor

import torchop
from tests.support import assert_clean, counting, needs_native, run_program

pytestmark = needs_native

T = torch.zeros(2)


def define(namespace, function, schema="(Tensor x) -> Tensor", name="op"):
    return torchop.custom_op(f"{namespace}::{name}", function, mutates_args=(), schema=schema)


class KernelError(Exception):
    pass


# --------------------------------------------------------------------------------------------------
# Exceptions


def raising(namespace, error):
    """An operator whose kernel raises `error` as long as it is the last in the list."""
    errors = [error]

    def kernel(x: Tensor) -> Tensor:
        if errors:
            raise errors[-1]
        return x + 1

    op = define(namespace, kernel)
    op.register_autograd(lambda ctx, grad: grad)
    return op, errors


def caught_from(call):
    """The exception of a call that is made while another exception is handled."""
    outer, caught = KernelError("outer"), None
    try:
        raise outer
    except KernelError:
        try:
            call()
        except BaseException as error:
            caught = error
    assert caught is not None
    assert caught.__context__ is outer
    return caught


def inputs(with_grad):
    return T.clone().requires_grad_(with_grad)


GRAD = pytest.mark.parametrize("with_grad", [False, True])


@GRAD
@pytest.mark.parametrize(
    "error",
    [KernelError("kernel"), KeyboardInterrupt(), SystemExit(3), MemoryError(), StopIteration(4)],
    ids=lambda error: type(error).__name__,
)
def test_exception_of_a_kernel_is_the_callers(namespace, error, with_grad):
    op, errors = raising(namespace, KernelError("first"))
    x = inputs(with_grad)
    with pytest.raises(KernelError):
        op(x)  # the first call that records a gradient is never native
    errors.append(error)
    with counting(op) as calls:
        assert caught_from(lambda: op(x)) is error
    assert calls == {"native": 1}
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert names[-1] == "kernel"
    assert names[0] == "caught_from"
    with torchop.native.disabled():
        assert caught_from(lambda: op(x)) is error
    assert error.__cause__ is None
    errors.clear()
    with counting(op) as calls:
        assert op(x).tolist() == [1, 1]
    assert calls == {"native": 1}


@GRAD
def test_state_of_the_thread_is_restored_after_an_exception(namespace, with_grad):
    op, _ = raising(namespace, KernelError())
    x = inputs(with_grad)
    for _ in range(3):
        with pytest.raises(KernelError):
            op(x)
    assert torch.is_grad_enabled()
    y = x * 2
    assert y.requires_grad is with_grad
    assert not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradCPU)


def test_exception_that_is_raised_again_and_again_keeps_no_frames(namespace):
    """Its traceback belongs to whoever catches it."""
    error = KernelError()
    op, _ = raising(namespace, error)
    kept = []

    def call():
        local = torch.zeros(3)
        kept.append(weakref.ref(local))
        with pytest.raises(KernelError):
            op(local)

    call()
    error.__traceback__ = None
    gc.collect()
    assert kept[0]() is None


def test_exception_of_a_setup_context_is_the_callers(namespace):
    op = define(namespace, lambda x: x + 1)
    broken = True

    def setup_context(ctx, inputs, output):
        if broken:
            raise KernelError("setup")

    op.register_autograd(lambda ctx, grad: grad * 5, setup_context=setup_context)
    x = inputs(True)
    with pytest.raises(KernelError):
        op(x)
    with counting(op) as calls, pytest.raises(KernelError, match="setup"):
        op(x)
    assert calls == {"native": 1}
    broken = False
    op(x).sum().backward()
    assert x.grad.tolist() == [5, 5]


def saving(namespace, save):
    op = define(namespace, lambda x: x + 1)
    op.register_autograd(
        lambda ctx, grad: grad, setup_context=lambda ctx, inputs, output: save(ctx)
    )
    return op


MISUSE = {
    "save 3": lambda ctx: ctx.save_for_backward(3),
    "save a list": lambda ctx: ctx.save_for_backward([T]),
    "to_save 3": lambda ctx: setattr(ctx, "to_save", 3),
    "dirty 3": lambda ctx: ctx.mark_dirty(3),
    "non-differentiable 3": lambda ctx: ctx.mark_non_differentiable(3),
    "non_differentiable list": lambda ctx: setattr(ctx, "non_differentiable", [T]),
    "dirty_tensors string": lambda ctx: setattr(ctx, "dirty_tensors", "abc"),
    "needs_input_grad 3": lambda ctx: setattr(ctx, "needs_input_grad", 3),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_of_ctx_is_refused_as_on_the_dispatchers_way(namespace, misuse):
    """In a program of its own: what is not refused may end it."""
    program = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    import torch, torchop
    from tests.native.test_faults import MISUSE, saving

    op = saving("misuse", MISUSE[{misuse!r}])
    x = torch.zeros(2, requires_grad=True)

    def outcome():
        try:
            op(x).sum().backward()
        except Exception as error:
            return type(error), str(error)
        return "accepted"

    outcome()
    with torchop.native.disabled():
        expected = outcome()
    got = outcome()
    assert torchop.native.counters(op).get("native") == 1, torchop.native.counters(op)
    # PyTorch loses the end of some of these messages.
    assert got[0] is expected[0] and got[1].startswith(expected[1]), (got, expected)
    """
    assert_clean(run_program(program))


def assert_refused_on_both_ways(op, x, error):
    """A call raises the same error with the same message, native or not."""
    with torchop.native.disabled(), pytest.raises(error) as expected:
        op(x)
    with counting(op) as calls, pytest.raises(error) as got:
        op(x)
    assert calls == {"native": 1}
    assert str(got.value) == str(expected.value)


@GRAD
@pytest.mark.parametrize("result", [None, 3, "text", (), (T, T), [T]], ids=repr)
def test_wrong_result_is_refused_as_on_the_dispatchers_way(namespace, with_grad, result):
    op = define(namespace, lambda x: result)
    op.register_autograd(lambda ctx, grad: grad)
    assert_refused_on_both_ways(op, inputs(with_grad), torchop.ResultError)


@GRAD
def test_argument_that_is_returned_is_refused_as_on_the_dispatchers_way(namespace, with_grad):
    op = define(namespace, lambda x: x)
    op.register_autograd(lambda ctx, grad: grad)
    assert_refused_on_both_ways(op, inputs(with_grad), torchop.AliasError)


@pytest.mark.parametrize(
    "call",
    [
        lambda op: op(),
        lambda op: op(T, T, T, T),
        lambda op: op(T, y=3),
        lambda op: op(T, x=T),
        lambda op: op(3),
        lambda op: op(T, "text"),
        lambda op: op(T, None),
        lambda op: op(None),
        lambda op: op([T]),
    ],
)
def test_wrong_arguments_are_refused_in_the_dispatchers_words(namespace, call):
    op = define(namespace, lambda x, n=1: x + n, "(Tensor x, int n=1) -> Tensor")
    op(T)
    with torchop.native.disabled(), pytest.raises(Exception) as expected:
        call(op)
    with pytest.raises(type(expected.value)) as got:
        call(op)
    assert str(got.value) == str(expected.value)
    with counting(op) as calls:
        assert op(T).tolist() == [1, 1]
    assert calls == {"native": 1}


# --------------------------------------------------------------------------------------------------
# Depth


@GRAD
def test_endless_recursion_is_an_exception(with_grad):
    """In a program of its own: the alternative is the end of the process."""
    program = f"""
    import torch, torchop

    @torchop.custom_op("deep::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return op(x) + 1

    op.register_autograd(lambda ctx, grad: grad)
    x = torch.zeros(1, requires_grad={with_grad})
    for _ in range(3):
        try:
            op(x)
        except RecursionError:
            pass
        else:
            raise AssertionError
    counters = torchop.native.counters(op)
    assert counters["native"] > 500, counters
    """
    assert_clean(run_program(program))


def test_depth_that_a_python_function_reaches_is_reached(namespace):
    def kernel(x: Tensor, depth: int) -> Tensor:
        return x + 1 if depth == 0 else op(x, depth - 1) + 1

    op = define(namespace, kernel, "(Tensor x, int depth) -> Tensor")
    with counting(op) as calls:
        assert op(T, 200).tolist() == [201, 201]
    assert calls == {"native": 201}


def test_operators_call_one_another(namespace):
    inner = define(namespace, lambda x: x + 1, name="inner")
    outer = define(namespace, lambda x: inner(x) * 10, name="outer")
    for op in (inner, outer):
        op.register_autograd(lambda ctx, grad: grad * 7)
    x = inputs(True)
    outer(x)
    with counting(inner) as inner_calls, counting(outer) as outer_calls:
        outer(x).sum().backward()
    assert x.grad.tolist() == [7, 7]  # what happens inside an operator is not recorded
    assert (inner_calls, outer_calls) == ({"native": 1}, {"native": 1})


# --------------------------------------------------------------------------------------------------
# Changes during a call


@GRAD
def test_kernel_may_replace_itself(namespace, with_grad):
    def kernel(x: Tensor) -> Tensor:
        op.register_kernel("cpu", lambda x: x + 5)
        gc.collect()
        return x + 1

    op = define(namespace, kernel)
    op.register_autograd(lambda ctx, grad: grad)
    x = inputs(with_grad)
    op.register_kernel("cpu", lambda x: x + 3)
    op(x)
    op.register_kernel("cpu", kernel)
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
    assert x.grad.tolist() == [3, 3]  # the formula is that of the backward pass


def test_kernel_may_drop_the_last_reference_to_the_handle_that_calls_it(namespace):
    """The plan and the entry of a call outlive it."""
    from torchop._native import switch

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
        op.register_kernel("cpu", lambda x: x + 2)
        op.register_kernel("cpu", lambda x: x + 3)
        op.register_autograd(lambda ctx, grad: grad)
        with op.set_kernel_enabled("cpu", enabled=False):
            time.sleep(0.0005)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert unexpected == []
    assert torchop.native.counters(op)["native"] > 100


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


# --------------------------------------------------------------------------------------------------
# Processes


def test_interpreter_ends_with_graphs_and_handles_alive():
    program = """
    import atexit, sys
    import torch, torchop
    from torch import Tensor

    @torchop.custom_op("shutdown::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    op.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output),
    )
    x = torch.ones(2, requires_grad=True)
    alive = [op(x) for _ in range(10)]
    alive.append(alive)
    sys.alive = [op(op(x)).sum(), op, op.overload, torch.ops.shutdown.op, alive]
    op.myself = op

    class AtTheEnd:
        def __del__(self, op=op, x=x):
            op(x)

    sys.at_the_end = AtTheEnd()
    op.at_the_end = AtTheEnd()
    atexit.register(lambda: op(x).sum().backward())

    assert torchop.native.counters(op)["native"] > 5
    """
    for _ in range(3):
        assert_clean(run_program(program))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_child_of_a_fork_calls_natively(namespace):
    op = define(namespace, lambda x: x + 1)
    op.register_autograd(lambda ctx, grad: grad * 5)
    x = inputs(True)
    op(x)
    op(x)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(20)
            with counting(op) as calls:
                right = op(T).tolist() == [1, 1] and op(x).tolist() == [1, 1]
            op.register_kernel("cpu", lambda x: x + 2)
            right = right and op(T).tolist() == [2, 2]
            other = define(f"{namespace}_child", lambda x: x + 3)
            right = right and other(T).tolist() == [3, 3]
            status = 0 if right and calls == {"native": 2} else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --------------------------------------------------------------------------------------------------
# Unusual arguments


# PyTorch takes up to 64, with `n` and `k`.
@pytest.mark.parametrize("count", [1, 31, 37, 38, 39, 62])
@pytest.mark.parametrize("with_grad", [False, True])
def test_any_number_of_arguments(namespace, count, with_grad):
    names = [sys.intern(f"x{n}") for n in range(count)]
    schema = f"({', '.join(f'Tensor {name}' for name in names)}, int n=1, *, int k=2) -> Tensor"
    op = define(namespace, lambda *xs, n=1, k=2: total(*xs, k=k), schema)
    op.register_autograd(lambda ctx, grad: tuple(grad for _ in range(count)) + (None,))

    def total(*xs, k):
        return sum(xs[:-1], start=torch.zeros(1)) + xs[-1] + k

    tensors = [torch.full((1,), float(n), requires_grad=with_grad) for n in range(count)]
    expected = sum(range(count)) + 1 + 2
    op(*tensors)
    with counting(op) as calls:
        assert op(*tensors).item() == expected
        assert op(*tensors, 1, k=2).item() == expected
        assert op(**dict(zip(names, tensors, strict=True))).item() == expected
        result = op(*tensors[:1], **dict(zip(names[1:], tensors[1:], strict=True)), k=12)
        assert result.item() == expected + 10
    assert calls == {"native": 4}
    if with_grad:
        result.backward()
        assert all(tensor.grad.item() == 1 for tensor in tensors)


def test_names_that_are_not_interned(namespace):
    op = define(namespace, lambda x, amount=1: x + amount, "(Tensor x, int amount=1) -> Tensor")
    name = "".join(["amo", "unt"])
    assert name is not sys.intern("amount")
    with counting(op) as calls:
        assert op(T, **{name: 5}).tolist() == [5, 5]
        assert op(**{"".join(["", "x"]): T, name: 5}).tolist() == [5, 5]
        with pytest.raises(RuntimeError, match="amounts"):
            op(T, **{name + "s": 5})
    assert calls == {"native": 2, "binding": 1}


def test_keywords_in_any_order(namespace):
    op = define(
        namespace,
        lambda x, a=1, b=2, *, c=3: x + a * 100 + b * 10 + c,
        "(Tensor x, int a=1, int b=2, *, int c=3) -> Tensor",
    )
    with counting(op) as calls:
        assert op(c=6, b=5, a=4, x=T).tolist() == [456, 456]
        assert op(T, b=5).tolist() == [153, 153]
        assert op(T, c=6).tolist() == [126, 126]
        assert op(T, 4, c=6).tolist() == [426, 426]
    assert calls == {"native": 4}


def test_one_object_for_many_arguments(namespace):
    names = [f"x{n}" for n in range(12)]
    schema = f"({', '.join(f'Tensor {name}' for name in names)}, Tensor[] xs) -> Tensor"
    op = define(namespace, lambda *xs: sum(xs[-1]) + sum(xs[:-1]), schema)
    op.register_autograd(lambda ctx, grad: (*[grad] * 12, [grad] * 3))
    x = torch.ones(2, requires_grad=True)
    op(*[x] * 12, [x] * 3)
    with counting(op) as calls:
        result = op(*[x] * 12, [x] * 3)
    assert calls == {"native": 1}
    assert result.tolist() == [15, 15]
    result.sum().backward()
    assert x.grad.tolist() == [15, 15]


def test_list_of_the_caller_is_not_the_kernels(namespace):
    def kernel(xs: list[Tensor], ns: list[int]) -> Tensor:
        result = xs[0] + sum(ns)
        xs.clear()
        ns.append(3)
        return result

    op = define(namespace, kernel, "(Tensor[] xs, int[] ns=[1, 2]) -> Tensor")
    xs, ns = [torch.ones(2), T], [4, 5]
    with counting(op) as calls:
        assert op(xs, ns).tolist() == [10, 10]
        assert op(tuple(xs)).tolist() == [4, 4]
        assert op(xs).tolist() == [4, 4]
    assert calls == {"native": 3}
    assert len(xs) == 2
    assert ns == [4, 5]


def test_list_of_the_kernel_is_not_the_setup_contexts(namespace):
    def kernel(xs: list[Tensor], ns: list[int]) -> Tensor:
        result = xs[0] + sum(ns)
        xs.clear()
        ns.clear()
        return result

    def setup_context(ctx, inputs, output):
        seen.append([len(item) for item in inputs])

    seen = []
    op = define(namespace, kernel, "(Tensor[] xs, int[] ns) -> Tensor")
    op.register_autograd(lambda ctx, grad: ([grad, None], None), setup_context=setup_context)
    xs = [inputs(True), T]
    op(xs, [1, 2, 3])
    with torchop.native.disabled():
        op(xs, [1, 2, 3])
    with counting(op) as calls:
        op(xs, [1, 2, 3]).sum().backward()
    assert calls == {"native": 1}
    assert seen == [[2, 3]] * 3


WRITES = {
    "a number": "xs[0] = 3",
    "none": "xs[:] = [None, None]",
    "a string appended": "xs.append('text')",
    "itself": "xs.append(xs)",
    "nothing": "xs.clear()",
}


@GRAD
@pytest.mark.parametrize("write", WRITES)
def test_kernel_may_write_anything_into_its_list(write, with_grad):
    """In a program of its own: what is taken for a tensor, and is none, ends it."""
    program = f"""
    import torch, torchop

    @torchop.custom_op("writes::op", mutates_args=())
    def op(xs: list[torch.Tensor]) -> torch.Tensor:
        result = xs[0] + 1
        {WRITES[write]}
        return result

    op.register_autograd(lambda ctx, grad: [grad, None])
    x = torch.zeros(2, requires_grad={with_grad})
    xs = [x, torch.zeros(2)]
    with torchop.native.disabled():
        assert op(xs).tolist() == [1, 1]
    for _ in range(3):
        result = op(xs)
        assert result.tolist() == [1, 1]
        if {with_grad}:
            x.grad = None
            result.sum().backward()
            assert x.grad.tolist() == [1, 1]
    assert len(xs) == 2 and xs[0] is x
    assert torchop.native.counters(op)["native"] == 3
    """
    assert_clean(run_program(program))


def test_arguments_that_a_partial_keeps_are_used_again(namespace):
    op = define(namespace, lambda x, y, n=1: x + y + n, "(Tensor x, Tensor y, int n=1) -> Tensor")
    partial = functools.partial(op, T, n=5)
    with counting(op) as calls:
        for _ in range(5):
            assert partial(torch.ones(2)).tolist() == [6, 6]
    assert calls == {"native": 5}
    assert partial.args == (T,)
    assert partial.keywords == {"n": 5}


def test_kernel_that_is_a_bound_method_or_an_object(namespace):
    """Calling a method borrows the place before the arguments, and gives it back."""

    class Kernel:
        amount = 5

        def method(self, x):
            return x + self.amount

        def __call__(self, x):
            return x + self.amount

    for number, kernel in enumerate(
        [Kernel().method, Kernel(), functools.partial(Kernel.method, Kernel())]
    ):
        op = define(f"{namespace}_{number}", kernel)
        for _ in range(3):
            assert op(T).tolist() == [5, 5]
            assert next(map(op, [T])).tolist() == [5, 5]


def test_numbers_beyond_64_bits_are_refused_as_on_the_dispatchers_way(namespace):
    op = define(namespace, lambda x, n: x + 1, "(Tensor x, int n) -> Tensor")
    assert op(T, 2**63 - 1).tolist() == [1, 1]
    assert op(T, -(2**63)).tolist() == [1, 1]
    for number in (2**63, -(2**63) - 1, 10**30):
        with torchop.native.disabled(), pytest.raises(Exception) as expected:
            op(T, number)
        with pytest.raises(type(expected.value)) as got:
            op(T, number)
        assert str(got.value) == str(expected.value)


def test_text_that_is_no_unicode_is_refused_as_on_the_dispatchers_way(namespace):
    op = define(namespace, lambda x, s: x + len(s), "(Tensor x, str s) -> Tensor")
    assert op(T, "a\0b\u20ac").tolist() == [4, 4]
    with torchop.native.disabled(), pytest.raises(RuntimeError) as expected:
        op(T, "\ud800")
    with pytest.raises(RuntimeError) as got:
        op(T, "\ud800")
    assert str(got.value) == str(expected.value)


def test_zero_has_the_sign_that_the_dispatcher_gives_it(namespace):
    # It takes -0.0 for the default, 0.0, and leaves it out.
    op = define(
        namespace,
        lambda x, a=0.0: x + math.copysign(1.0, a),
        "(Tensor x, float a=0.0) -> Tensor",
    )
    with counting(op) as calls:
        assert [op(T, zero).tolist() for zero in (0.0, -0.0)] == [[1, 1], [1, 1]]
    assert calls == {"native": 1, "argument_type": 1}


def test_warning_that_is_an_error_does_not_end_the_process():
    program = """
    import warnings
    import torch, torchop

    @torchop.custom_op("marks::op", mutates_args=())
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    op.register_autograd(
        lambda ctx, grad: grad,
        setup_context=lambda ctx, inputs, output: ctx.mark_dirty(output, torch.ones(3)),
    )
    warnings.simplefilter("error")
    x = torch.ones(2, requires_grad=True)
    for _ in range(3):
        try:
            op(x)
        except RuntimeError as error:
            assert "marked as dirty" in str(error)
    assert torchop.native.counters(op)["native"] == 2
    """
    assert run_program(program).returncode == 0
