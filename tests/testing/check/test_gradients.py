"""Checks of first derivatives with incoming gradients of several layouts, and of second ones.

Uses private names.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import product, save
from tests.testing.zoo.wrong_gradients import product_backward
from torchop.testing import check
from torchop.testing._check.checks.incoming_gradients import GRADIENT_LAYOUTS
from torchop.testing._check.run import plan_checks, run_check

X, Y = (torch.arange(12.0).reshape(3, 4).sin() + n for n in (2, 3))


def result_of(op, name="grad_strides"):
    (planned,) = plan_checks(op, [(X, Y)], only=name)
    return run_check(planned)


def test_fix_in_the_message_works(namespace):
    op = torchop.custom_op(f"{namespace}::op", product, mutates_args=())
    op.register_autograd(backward_kernel=product_backward)
    result = result_of(op)
    assert result.outcome == "failed"
    assert "contiguous_grads=True" in result.message
    assert "as sum() passes it" in result.message
    op.register_autograd(backward_kernel=product_backward, contiguous_grads=True)
    assert result_of(op).outcome == "passed"


def test_grad_strides_fails_for_accelerated_operators(namespace):
    op = torch.library.custom_op(f"{namespace}::op", product, mutates_args=())
    op.register_autograd(
        lambda ctx, grad: product_backward(grad, *ctx.saved_tensors), setup_context=save
    )
    with torchop.accelerate(f"{namespace}::op"):
        assert result_of(op).outcome == "failed"


@pytest.mark.parametrize("layout", GRADIENT_LAYOUTS)
def test_gradient_layouts_change_strides_but_not_values(layout):
    _, laid_out = GRADIENT_LAYOUTS[layout]
    values = torch.arange(12.0).reshape(3, 4)
    view = laid_out(values)
    assert view.shape == values.shape
    assert not view.is_contiguous() or view.storage_offset()
    assert not view.isnan().any()
    if "expanded" not in layout:
        assert torch.equal(view, values)
    # In this layout, a kernel that ignores strides reads incorrect values, so the check can detect
    # the kernel. The kernel still does not read out of bounds.
    rows = view.as_strided(values.shape, values.stride(), 0)
    assert not torch.equal(rows, view)


def test_random_gradients_are_not_compared(namespace):
    generator = torch.Generator()
    op = torchop.custom_op(f"{namespace}::op", product, mutates_args=())
    op.register_autograd(
        lambda ctx, grad: (grad * torch.rand(grad.shape, generator=generator), grad)
    )
    assert result_of(op).outcome == "passed"


def test_one_element_result_passes(namespace):
    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x.sum(), schema="(Tensor x) -> Tensor", mutates_args=()
    )
    op.register_autograd(
        lambda ctx, grad: grad.expand(ctx.shape),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
    )
    assert check(op, (X,), only="grad_strides").ok


def test_second_derivative_with_a_constant_incoming_gradient_is_checked(namespace):
    """With `create_graph=True`, autograd may pass a formula a gradient that requires no grad.

    Second derivatives must be correct in this case, too.
    """

    def cube(x: Tensor) -> Tensor:
        return x**3

    op = torchop.custom_op(f"{namespace}::op", cube, mutates_args=())

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * grad * (x if grad.requires_grad else x.detach()) ** 2

    op.register_autograd(backward, setup_context=save)
    (planned,) = plan_checks(op, [(X,)], only="needs_input_grad")
    result = run_check(planned)
    assert "if the incoming gradient requires no grad" in result.message
    assert f"torch.ops.{namespace}.op" in result.program


@pytest.mark.parametrize("kept", ["array", "view", "list"])
def test_memory_of_an_input_on_ctx_is_named(namespace, kept):
    keep = {
        "array": lambda x: x.detach().numpy(),
        "view": lambda x: x.detach()[:],
        "list": lambda x: [3, x.detach().numpy()],
    }[kept]

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.sin()

    @op.register_autograd(
        setup_context=lambda ctx, inputs, output: setattr(ctx, "a", keep(inputs[0]))
    )
    def _(ctx, grad):
        value = ctx.a[1] if kept == "list" else ctx.a
        return grad * torch.as_tensor(value).cos()

    report = check(op, (X.clone().requires_grad_(),), only="saved", raise_exception=False)
    (failure,) = report.failures
    assert "ctx.a keeps memory that the caller may write" in failure.message
    assert "ctx.save_for_backward" in failure.message


def test_gradients_of_infinite_or_nan_results_are_not_compared(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x / x.std(-1, keepdim=True)  # NaN for one column

    op.derive_autograd()
    check(op, (torch.tensor([[1.0, 2, 4], [3, 1, -2]]),), only="gradcheck")
