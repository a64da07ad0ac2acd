"""`torch_dispatch` rules for modes and subclasses, in calls that record residuals."""

from __future__ import annotations

from typing import Annotated

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def cube(x: Tensor, *, by: float = 1.0) -> Annotated[Tensor, torchop.Residuals(slope=Tensor)]:
    return torchop.residuals(x**3 * by, 3 * x**2 * by)


def slope_alone(grad: Tensor, slope: Tensor) -> Tensor:
    return grad * slope


def define(namespace):
    op = torchop.custom_op(f"{namespace}::op", cube, mutates_args=())
    op.register_fake(cube)
    op.register_autograd(backward_kernel=slope_alone)
    return op


def gradient_under_mode(op):
    x = torch.tensor([2.0], requires_grad=True)
    with Mode():
        result = op(x, by=2.0)
    return result.item(), torch.autograd.grad(result, x)[0].item()


@pytest.fixture(params=["before", "after"])
def register(request):
    """Register the rule before or after the backward kernel, whose parameters declare residuals."""

    def register(namespace, cls, rule):
        op = torchop.custom_op(f"{namespace}::op", cube, mutates_args=())
        if request.param == "before":
            op.register_torch_dispatch(cls, rule)
        op.register_autograd(backward_kernel=slope_alone)
        if request.param == "after":
            op.register_torch_dispatch(cls, rule)
        return op

    return register


def test_the_rule_of_a_mode_runs_where_a_gradient_is_recorded(namespace, register):
    seen = []

    def rule(mode, func, types, args, kwargs):
        seen.append((func.name(), kwargs))
        return func(*args, **kwargs)

    op = register(namespace, Mode, rule)
    for _ in range(2):
        assert gradient_under_mode(op) == (16.0, 24.0)
    assert seen == [(f"{namespace}::op", {"by": 2.0})] * 2
    op.register_torch_dispatch(Mode, lambda mode, func, types, args, kwargs: func(*args))
    assert gradient_under_mode(op) == (8.0, 12.0)


def test_a_rule_that_runs_no_kernel_is_refused(namespace, register):
    op = register(namespace, Mode, lambda mode, func, types, args, kwargs: args[0] + 1)
    with Mode():
        assert op(torch.ones(1)).item() == 2
    message = (
        rf"op: the torch_dispatch rule for Mode .*or register a rule for '{namespace}::op__with"
    )
    with pytest.raises(torchop.ResultError, match=message):
        gradient_under_mode(op)
    torchop.register_torch_dispatch(
        f"{namespace}::op__with_residuals",
        Mode,
        lambda mode, func, types, args, kwargs: (args[0] + 1, args[0] * 0 + 7),
    )
    assert gradient_under_mode(op) == (3.0, 7.0)
    assert not torchop.records_gradient()


@pytest.mark.parametrize("last", [True, False])
def test_a_rule_that_calls_the_operator_twice_is_refused(namespace, register, last):
    """The gradient would use the residuals of the call whose result the rule discards."""

    def rule(mode, func, types, args, kwargs):
        results = [func(args[0] + step, **kwargs) for step in (int(last), int(not last))]
        return results[last]

    op = register(namespace, Mode, rule)
    for _ in range(2):
        with Mode():
            assert op(torch.ones(1)).item() == 1
        with pytest.raises(torchop.ResultError, match=r"rule for Mode called func 2 times, but"):
            gradient_under_mode(op)


def test_the_rule_of_a_subclass_is_refused(namespace, register):
    def rule(cls, func, types, args, kwargs):
        return TwoTensor(func(args[0].a), func(args[0].b))

    op = register(namespace, TwoTensor, rule)
    x = torch.tensor([2.0])
    assert op(TwoTensor(x, x + 1)).b.item() == 27
    message = (
        rf"op: the torch_dispatch rule for TwoTensor .*Register a rule for '{namespace}::op__with"
    )
    with pytest.raises(torchop.ResultError, match=message):
        op(TwoTensor(x, x + 1).requires_grad_())

    def of_both(cls, func, types, args, kwargs):
        pairs = zip(func(args[0].a, **kwargs), func(args[0].b, **kwargs), strict=True)
        return tuple(TwoTensor(*pair) for pair in pairs)

    torchop.register_torch_dispatch(f"{namespace}::op__with_residuals", TwoTensor, of_both)
    two = TwoTensor(x, x + 1).requires_grad_()
    (gradient,) = torch.autograd.grad(op(two).sum(), two)
    assert (gradient.a.item(), gradient.b.item()) == (12, 27)


def test_a_vmap_rule_for_the_training_form(namespace):
    op = define(namespace)
    shapes = []

    @torchop.register_vmap(f"{namespace}::op__with_residuals")
    def rule(info, in_dims, x, *, by):
        shapes.append(tuple(x.shape))
        result, slope = getattr(torch.ops, namespace).op__with_residuals(x, by=by)
        return (result, slope), in_dims[0]

    x = torch.tensor([1.0, 2.0])
    gradients = torch.func.vmap(torch.func.grad(op))(x)
    assert gradients.tolist() == [3.0, 12.0]
    assert shapes == [(2,)]
