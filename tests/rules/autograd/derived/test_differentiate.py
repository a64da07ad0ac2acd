"""The backward of a derived formula runs under a different transform or mode than the forward."""

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp
from torch.testing import assert_close

import torchop
from tests.rules.autograd.derived.support import derived


def scaled(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sin()


def noisy(x: Tensor, y: Tensor) -> Tensor:
    return (x * torch.rand_like(x) * y).sin()


each_body = pytest.mark.parametrize("body", [scaled, noisy])


@pytest.fixture
def op(namespace, body):
    handle = torchop.custom_op(f"{namespace}::f", body, mutates_args=())
    handle.derive_autograd()
    return handle


def leaves():
    return torch.tensor([0.5, 2.0], requires_grad=True), torch.tensor([3.0, 4.0]).requires_grad_()


def gradient_of(function):
    x, y = leaves()
    return grad(lambda x, y: function(x, y).sum(), argnums=(0, 1))(x.detach(), y.detach())


def second_gradient_of(function):
    x, y = leaves()
    return grad(lambda x: grad(lambda x: function(x, y).sum())(x).sum())(x.detach())


def constants_of(function):
    x, y = leaves()
    _, pull = vjp(lambda x: function(x, y.detach()), x.detach())
    return pull(torch.ones(2)), jacrev(lambda x: function(x, y.detach()))(x.detach())


def gradient_of_a_cotangent(function):
    x, y = leaves()
    cotangent = torch.ones(2, requires_grad=True)
    _, pull = vjp(lambda x: function(x, y.detach()), x.detach())
    return torch.autograd.grad(pull(cotangent)[0].sum(), cotangent)


def gradient_of_a_captured_tensor(function):
    x, y = leaves()
    _, pull = vjp(lambda x: function(x, y), x.detach())
    return torch.autograd.grad(pull(torch.ones(2))[0].sum(), y)


def of_a_batch(function):
    x, y = leaves()
    results = torch.autograd.grad(
        function(x, y), (x, y), torch.eye(2), is_grads_batched=True, create_graph=True
    )
    return results, torch.autograd.grad(results[0].sum(), y)


def in_inference_mode(function):
    x, y = leaves()
    result = function(x, y) + function(x, y)
    with torch.inference_mode():
        return torch.autograd.grad(result, (x, y), torch.ones(2))


@each_body
@pytest.mark.parametrize(
    "scenario",
    [
        gradient_of,
        second_gradient_of,
        constants_of,
        gradient_of_a_cotangent,
        gradient_of_a_captured_tensor,
        of_a_batch,
        in_inference_mode,
    ],
)
def test_gradients_equal_the_bodys(op, body, scenario):
    torch.manual_seed(3)
    expected = scenario(body)
    torch.manual_seed(3)
    result = scenario(op)
    assert_close(result, expected)
    needs = [[t.requires_grad for t in tensors(values)] for values in (result, expected)]
    assert needs[0] == needs[1]


def tensors(values):
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in tensors(value)]


def test_a_body_whose_second_run_has_another_shape_is_refused(namespace):
    """Without this error, autograd would sum the gradient as if the result had been broadcast."""
    sizes = [3, 1, 1]

    def changing(x: Tensor) -> Tensor:
        return x.sum() * torch.ones(sizes.pop(0))

    op = derived(f"{namespace}::op", changing)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        op(x).sum().backward()
