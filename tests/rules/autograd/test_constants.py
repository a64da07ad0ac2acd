"""Second derivatives through tensors that `setup_context` computes."""

from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import counting, needs_native
from torchop import MissingFormulaError


def leaf(value: float = 0.5) -> Tensor:
    return torch.tensor([value], dtype=torch.float64, requires_grad=True)


def second_derivative(op: Any, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    assert_close(first.detach(), x.detach().cos())
    (second,) = torch.autograd.grad(first.sum(), x)
    return second


def save_cosine(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0].cos())


def store_cosine(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.cosine = inputs[0].cos()


def save_of_result(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward((1 - output**2).sqrt())


def saved(ctx: Any, grad: Tensor) -> Tensor:
    return grad * ctx.saved_tensors[0]


def stored(ctx: Any, grad: Tensor) -> Tensor:
    return grad * ctx.cosine


CONSTANTS = {
    "saved": (save_cosine, saved),
    "stored": (store_cosine, stored),
    "from the result": (save_of_result, saved),
}


def define(namespace: str, setup_context: Any, backward: Any) -> Any:
    @torchop.custom_op(f"{namespace}::sin", mutates_args=())
    def sin(x: Tensor) -> Tensor:
        return x.sin()

    sin.register_fake(like="x")
    sin.register_autograd(backward, setup_context=setup_context)
    return sin


@pytest.mark.parametrize(("setup_context", "backward"), CONSTANTS.values(), ids=CONSTANTS)
def test_derivative_of_a_computed_tensor_is_unknown(
    namespace: str, setup_context: Any, backward: Any
) -> None:
    sin = define(namespace, setup_context, backward)
    for call in (sin, sin, sin._opoverload):  # later calls may be native
        with pytest.raises(MissingFormulaError, match=f"{namespace}::sin: .*setup_context compute"):
            second_derivative(call, leaf())


@needs_native
def test_the_second_call_is_native(namespace: str) -> None:
    sin = define(namespace, save_cosine, saved)
    sin(leaf())
    with counting(sin) as calls:
        sin(leaf())
    assert calls == {"native": 1}


def test_a_formula_that_computes_the_tensor_again_has_a_second_derivative(namespace: str) -> None:
    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0], inputs[0].cos())

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, cosine = ctx.saved_tensors
        return grad * (x.cos() if torch.is_grad_enabled() else cosine)

    x = leaf()
    for _ in range(2):
        assert_close(second_derivative(define(namespace, save, backward), x), -x.detach().sin())


def test_a_mask_is_constant(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::relu", mutates_args=())
    def relu(x: Tensor) -> Tensor:
        return x.relu()

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward((inputs[0] > 0).double(), torch.rand_like(inputs[0]))

    relu.register_autograd(lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=save)
    for _ in range(2):
        x = leaf()
        (first,) = torch.autograd.grad((relu(x) ** 2).sum(), x, create_graph=True)
        assert_close(torch.autograd.grad(first.sum(), x)[0].item(), 2.0)


def test_a_tensor_computed_from_an_input_without_gradient_is_constant(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, w: Tensor) -> Tensor:
        return x.float() * w**2

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0].float(), inputs[1])

    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        x, w = ctx.saved_tensors
        return None, grad * x * w * 2

    scale.register_autograd(backward, setup_context=save)
    for _ in range(2):
        w = torch.tensor([3.0], requires_grad=True)
        (first,) = torch.autograd.grad(scale(leaf().detach(), w).sum(), w, create_graph=True)
        assert_close(torch.autograd.grad(first.sum(), w)[0].item(), 1.0)


def test_random_numbers_of_setup_context_are_drawn_once(namespace: str) -> None:
    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0].cos(), torch.rand(1))

    def next_number(count: int) -> float:
        torch.manual_seed(0)
        for _ in range(count):
            sin(leaf())
        return torch.rand(1).item()

    sin = define(namespace, save, saved)
    first, again = next_number(1), next_number(1)
    assert first == again


@pytest.mark.parametrize("part", ["saved", "stored"])
def test_derivative_of_a_copied_residual_is_unknown(namespace: str, part: str) -> None:
    @torchop.custom_op(f"{namespace}::sin", mutates_args=())
    def sin(x: Tensor) -> Annotated[Tensor, torchop.Residuals(cosine=Tensor)]:
        return torchop.residuals(x.sin(), x.cos())

    def save(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
        if part == "saved":
            ctx.save_for_backward(residuals.cosine.clone())
        else:
            ctx.cosine = residuals.cosine * 1

    sin.register_autograd(saved if part == "saved" else stored, setup_context=save)
    for call in (sin, sin, sin._opoverload):
        with pytest.raises(MissingFormulaError, match=f"{namespace}::sin: the second derivative"):
            second_derivative(call, leaf())
