"""Native calls raise the same exceptions, with the same messages, as the dispatcher."""

from __future__ import annotations

import gc
import sys
import traceback
import weakref

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import assert_clean, counting, needs_native
from tests._support.forking import run_forked
from tests.native.scenarios import GRAD, T, define, inputs

pytestmark = needs_native


class KernelError(Exception):
    pass


def raising(namespace, error):
    """Return an operator, and a list of exceptions whose last item the operator's kernel raises."""
    errors = [error]

    def kernel(x: Tensor) -> Tensor:
        if errors:
            raise errors[-1]
        return x + 1

    op = define(namespace, kernel)
    op.register_autograd(lambda ctx, grad: grad)
    return op, errors


def caught_from(call):
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


@GRAD
@pytest.mark.parametrize(
    "error",
    [KernelError("kernel"), KeyboardInterrupt(), SystemExit(3), MemoryError(), StopIteration(4)],
    ids=lambda error: type(error).__name__,
)
def test_exception_of_a_kernel_reaches_the_caller(namespace, error, with_grad):
    op, errors = raising(namespace, KernelError("first"))
    x = inputs(with_grad)
    with pytest.raises(KernelError):
        op(x)  # the first call that records a gradient is never native, so make it before counting
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


def test_exception_raised_repeatedly_keeps_no_frames_alive(namespace):
    """Once the traceback of the exception is removed, no frame of the call may be alive."""
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


def test_exception_of_a_setup_context_reaches_the_caller(namespace):
    op = define(namespace, lambda x: x + 1)
    broken = True

    def setup_context(ctx, inputs, output):
        if broken:
            raise KernelError("setup")

    op.register_autograd(lambda ctx, grad: grad * 5, setup_context=setup_context)
    x = inputs(True)
    with pytest.raises(KernelError):
        op(x)
    with pytest.raises(KernelError, match="setup"):
        op(x)
    broken = False
    op(x).sum().backward()  # until a call succeeds, no call that records a gradient is native
    broken = True
    with counting(op) as calls, pytest.raises(KernelError, match="setup"):
        op(x)
    assert calls == {"native": 1}
    broken = False
    op(x).sum().backward()
    assert x.grad.tolist() == [10, 10]


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
    "_pt_metadata 3": lambda ctx: setattr(ctx, "_pt_metadata", 3),
    "needs_input_grad 3": lambda ctx: setattr(ctx, "needs_input_grad", 3),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_of_ctx_raises_as_in_the_dispatcher(namespace, misuse):
    """Runs in a child process, because the process may crash if misuse is not detected."""
    program = f"""
    import sys
    sys.path[:0] = {sys.path!r}
    import torch, torchop
    from tests.native.test_exceptions import MISUSE, saving

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
    if {misuse!r} != "to_save 3":  # no call succeeds, so none that records a gradient is native
        assert torchop.native.counters(op).get("native") == 1, torchop.native.counters(op)
    # PyTorch truncates some of these messages, so compare only the start.
    assert got[0] is expected[0] and got[1].startswith(expected[1]), (got, expected)
    """
    assert_clean(run_forked(program))


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
def test_wrong_arguments_raise_the_dispatchers_message(namespace, call):
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
    assert run_forked(program).returncode == 0
