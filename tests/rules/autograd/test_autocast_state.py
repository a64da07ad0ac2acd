"""A formula runs in the autocast state in which the kernel ran, in eager and compiled code."""

import contextlib

import pytest
import torch
import torch._dynamo
from torch import Tensor

import torchop
from tests._support.devices import TYPE

LOWER = torch.bfloat16
BACKENDS = (None, "aot_eager", "inductor")


def recording(states):
    """Return the functions of an operator whose formula appends autocast's state to `states`."""

    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    def backward(ctx, grad):
        states.append(torch.get_autocast_dtype(TYPE) if torch.is_autocast_enabled(TYPE) else None)
        x, w = ctx.saved_tensors
        return grad * w, grad * x

    return kernel, setup_context, backward


def by_custom_op(namespace, functions):
    kernel, setup_context, backward = functions
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
    op.register_fake(lambda x, w: x * w)
    op.register_autograd(backward, setup_context=setup_context)
    return op


def by_torch_ops(namespace, functions):
    by_custom_op(namespace, functions)
    return getattr(torch.ops, namespace).op


def by_class(namespace, functions):
    setup, formula = functions[1:]

    @torchop.operator(f"{namespace}::op")
    class op:
        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return x * w

        @staticmethod
        def fake(x, w):
            return x * w

        @staticmethod
        def setup_context(ctx, inputs, output):
            setup(ctx, inputs, output)

        @staticmethod
        def backward(ctx, grad):
            return formula(ctx, grad)

    return op


def by_library(namespace, functions):
    kernel, setup_context, backward = functions
    qualname = f"{namespace}::op"
    torchop.define(qualname, "(Tensor x, Tensor w) -> Tensor")
    torchop.impl(qualname, "default", kernel)
    torchop.register_fake(qualname, lambda x, w: x * w)
    torchop.register_autograd(qualname, backward, setup_context=setup_context)
    return getattr(torch.ops, namespace).op


FORMS = (by_custom_op, by_torch_ops, by_class, by_library)


def run(op, backend, *, forward=LOWER, backward=None, dynamic=False):
    def f(x, w):
        return op(x, w) * 2

    called = f if backend is None else torch.compile(f, backend=backend, dynamic=dynamic)
    x, w = torch.ones(4, requires_grad=True), torch.full((4,), 3.0, requires_grad=True)
    with torch.autocast(TYPE, dtype=forward or LOWER, enabled=forward is not None):
        y = called(x, w)
    with torch.autocast(TYPE, dtype=backward or LOWER, enabled=backward is not None):
        y.sum().backward()
    assert x.grad.tolist() == [6] * 4
    assert x.grad.dtype is w.grad.dtype is torch.float32


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_the_formula_has_the_state_of_the_region_of_the_forward(namespace, form, backend):
    states = []
    run(form(namespace, recording(states)), backend)
    assert set(states) == {LOWER}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", FORMS)
def test_autocast_is_off_in_the_formula_if_there_is_an_autocast_rule(namespace, form, backend):
    states = []
    op = form(namespace, recording(states))
    torchop.register_autocast(f"{namespace}::op", TYPE, torch.float32)
    run(op, backend, dynamic=True)
    run(op, backend, backward=LOWER)
    assert set(states) == {None}


@pytest.mark.parametrize("forward", [None, torch.float16, LOWER])
@pytest.mark.parametrize("backward", [None, torch.float16, LOWER])
def test_the_region_of_the_backward_does_not_matter(namespace, forward, backward):
    states = []
    op = by_custom_op(namespace, recording(states))
    before = torch.get_autocast_dtype(TYPE)
    run(op, None, forward=forward, backward=backward)
    assert states == [forward]
    assert torch.get_autocast_dtype(TYPE) is before
    assert not torch.is_autocast_enabled(TYPE)
    assert torch.is_autocast_cache_enabled()


def test_disabled_inner_region(namespace):
    states = []
    op = by_custom_op(namespace, recording(states))
    x = torch.ones(4, requires_grad=True)
    with torch.autocast(TYPE, dtype=LOWER):
        with torch.autocast(TYPE, enabled=False):
            y = op(x, x)
        y.sum().backward()
        assert torch.is_autocast_enabled(TYPE)
    assert states == [None]


def test_the_state_is_restored_if_the_formula_raises(namespace):
    def backward(ctx, grad):
        raise ZeroDivisionError

    kernel, setup_context, _ = recording([])
    op = by_custom_op(namespace, (kernel, setup_context, backward))
    x = torch.ones(4, requires_grad=True)
    with torch.autocast(TYPE, dtype=LOWER):
        y = op(x, x)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert not torch.is_autocast_enabled(TYPE)


def test_a_double_backward_has_the_state_of_the_forward(namespace):
    states = []
    op = by_custom_op(namespace, recording(states))
    x = torch.ones(4, requires_grad=True)
    with torch.autocast(TYPE, dtype=LOWER):
        y = op(x, x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    grad.sum().backward()
    assert x.grad.tolist() == [2] * 4
    assert states == [LOWER]


@pytest.mark.parametrize("has_rule", [False, True])
def test_compiled_autograd_restores_the_state_of_the_forward(namespace, has_rule):
    def kernel(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(x, w)

    _, setup_context, _ = recording([])

    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return torch.mm(grad, w.t()), torch.mm(x.t(), grad)

    op = by_custom_op(namespace, (kernel, setup_context, backward))
    if has_rule:
        op.register_autocast("float32")
    torch.manual_seed(0)
    values = torch.randn(8, 8), torch.randn(8, 8)
    compiler = torch.compile(backend="aot_eager", fullgraph=True)
    found = []
    for mode in (contextlib.nullcontext(), torch._dynamo.compiled_autograd._enable(compiler)):
        x, w = (value.clone().requires_grad_() for value in values)
        with torch.autocast(TYPE, dtype=LOWER):
            y = op(x, w)
        with mode:
            y.sum().backward()
        found.append((x.grad, w.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)
