from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.integration.beginners.mistake import compiled, mistake, multiply_of


def trained(n: str, backward: Callable[..., Any], keep: Any = None) -> Any:
    multiply = multiply_of(n)
    multiply.register_autograd(backward, setup_context=keep)
    x, y = torch.ones(2, 2, 3, requires_grad=True)
    return multiply(x, y).sum().backward()


@mistake(RuntimeError, cause="no autograd formula was registered", fix="register_autograd('{n}::")
def training_without_a_formula(n: str) -> None:
    multiply_of(n)(torch.ones(1, requires_grad=True), torch.ones(1)).backward()


@mistake(ValueError, cause="has no setup_context", fix="setup_context(ctx, inputs, output)")
def saved_tensors_without_setup_context(n: str) -> None:
    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    trained(n, backward)


@mistake(ValueError, cause="saved no tensors", fix="add ctx.save_for_backward(...)")
def reads_unsaved_tensors(n: str) -> None:
    def keep(ctx, inputs, output):
        ctx.x, ctx.y = inputs

    def backward(ctx, grad):
        x, y = ctx.saved_tensors
        return grad * y, grad * x

    trained(n, backward, keep)


@mistake(AttributeError, cause="setup_context of", fix="add ctx.scale = ... there")
def reads_unset_ctx_attribute(n: str) -> None:
    def keep(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    trained(n, lambda ctx, grad: (grad * ctx.scale, grad), keep)


@mistake(TypeError, cause="backward is called with (ctx, grad_0)", fix="Give it these parameters")
def formula_without_ctx(n: str) -> None:
    trained(n, lambda grad: (grad, grad))


@mistake(
    TypeError, cause="incorrect number of gradients (expected 2, got 1)", fix="each input: x, y"
)
def one_gradient_for_two_inputs(n: str) -> None:
    trained(n, lambda ctx, grad: grad)


@mistake(TypeError, cause="(expected 2, got 1)", fix="Is a return statement missing?")
def gradients_that_are_not_returned(n: str) -> None:
    def backward(ctx, grad):
        grad, grad  # noqa: B018  (the mistake)

    trained(n, backward)


@mistake(
    TypeError, cause="expected the shape (2, 3), got (3,)", fix="Sum over broadcast dimensions"
)
def gradient_of_another_shape(n: str) -> None:
    trained(n, lambda ctx, grad: (grad, grad.sum(0)))


@mistake(TypeError, cause="expected real numbers, got torch.complex64", fix=".real")
def gradient_of_another_dtype(n: str) -> None:
    trained(n, lambda ctx, grad: (grad, grad * 1j))


@mistake(TypeError, cause="expected a tensor on cpu, got one on meta", fix=".to('cpu')")
def gradient_on_another_device(n: str) -> None:
    trained(n, lambda ctx, grad: (grad, grad.to("meta")))


@mistake(TypeError, cause="wrong gradient for input 'x'", fix="expected a Tensor or None")
def gradient_that_is_an_array(n: str) -> None:
    trained(n, lambda ctx, grad: (grad.numpy(), grad))


@mistake(
    RuntimeError, cause="autograd cannot differentiate NumPy", fix="an operator that has a formula"
)
def second_derivative_through_numpy(n: str) -> None:
    multiply = multiply_of(n)

    @multiply.register_autograd
    def _(ctx, grad):
        return torch.from_numpy(grad.numpy() * 2), grad

    x = torch.ones(1, requires_grad=True)
    torch.autograd.grad(multiply(x, x) ** 2, x, create_graph=True)


@mistake(RuntimeError, cause="it read the data of a tensor", fix="backward_kernel=backward")
def compiling_a_formula_in_numpy(n: str) -> None:
    multiply = multiply_of(n)
    multiply.register_fake(lambda x, y: torch.empty_like(x))
    multiply.register_autograd(lambda ctx, grad: (torch.from_numpy(grad.numpy()), None))
    x = torch.ones(1, requires_grad=True)
    compiled(lambda x: multiply(x, torch.ones(1)).sum(), x, "aot_eager")
