"""Backward kernels: operators whose parameters say what is saved for them."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from torchop import MissingFakeError, MissingFormulaError, RuleSignatureError


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def forward(x: Tensor, w: Tensor | None = None, scale: float = 1.0) -> Tensor:
    y = x * scale if w is None else x * w * scale
    return torchop.residuals(y.logsumexp(-1), y.softmax(-1))


def fake(x, w=None, scale=1.0):
    return torchop.residuals(x.new_empty(x.shape[:-1]), torch.empty_like(x))


def in_numpy(
    grad: Tensor, x: Tensor, w: Tensor | None, softmax: Tensor, scale: float
) -> tuple[Tensor, Tensor | None]:
    product = torch.from_numpy(grad.numpy()[..., None] * softmax.numpy() * np.float32(scale))
    return (product.clone(), None) if w is None else (product * w, product * x)


def define(namespace, kernel=in_numpy):
    op = torchop.custom_op(
        f"{namespace}::op", forward, mutates_args=(), residuals={"softmax": Tensor}
    )
    op.register_fake(fake)
    op.register_autograd(backward_kernel=kernel)
    return op


def gradients_of(function, *values):
    inputs = [value for value in values if isinstance(value, Tensor)]
    return torch.autograd.grad(function(*values).sum(), inputs)


X, W = (torch.arange(12.0).reshape(4, 3).sin() + n for n in range(2))


@pytest.mark.parametrize("values", [(X, W, 2.0), (X,), (X, W)], ids=["all", "one", "default"])
def test_gradients(namespace, values):
    op = define(namespace)
    values = [v.clone().requires_grad_() if isinstance(v, Tensor) else v for v in values]
    expected = gradients_of(lambda *args: forward(*args).output, *values)
    compiled = torch.compile(
        lambda *args: op(*args), fullgraph=True, backend="aot_eager", dynamic=True
    )
    for function in (op, op, compiled):
        for gradient, right in zip(gradients_of(function, *values), expected, strict=True):
            assert_close(gradient, right)


def test_the_kernel_is_an_operator(namespace):
    op = define(namespace)
    name = f"{namespace}::op__backward_kernel"
    schema = "(Tensor grad, Tensor x, Tensor? w, Tensor softmax, float scale) -> (Tensor, Tensor)"
    assert schema in str(getattr(torch.ops, namespace).op__backward_kernel.default._schema)
    ran = []

    @torchop.register_kernel(name, "cpu")
    def kernel(grad, x, w, softmax, scale):
        ran.append(scale)
        return in_numpy(grad, x, w, softmax, scale)

    x = X.clone().requires_grad_()
    with torch.profiler.profile() as profile:
        gradients_of(op, x)
    assert ran == [1.0]
    assert name in {event.key for event in profile.key_averages()}
    assert_close(torch.func.vmap(torch.func.grad(op))(X), X.softmax(-1))


def test_a_second_derivative_needs_a_formula_of_the_kernel(namespace):
    def square(x: Tensor) -> Tensor:
        return x * x

    def slope(grad: Tensor, x: Tensor) -> Tensor:
        return 2 * x * grad

    op = torchop.custom_op(f"{namespace}::op", square, mutates_args=())
    op.register_autograd(backward_kernel=slope)
    x = torch.tensor([3.0], requires_grad=True)

    def second():
        (gradient,) = torch.autograd.grad(op(x), x, create_graph=True)
        return torch.autograd.grad(gradient, x)[0]

    with pytest.raises(MissingFormulaError, match=r"register_autograd\('.*op__backward_kernel'"):
        second()
    torchop.register_autograd(
        f"{namespace}::op__backward_kernel",
        lambda ctx, grad: (2 * ctx.saved_tensors[1] * grad, 2 * ctx.saved_tensors[0] * grad),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    )
    assert second() == 2


def test_the_output_and_several_results(namespace):
    def waves(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), x.exp()

    def kernel(first: Tensor, second: Tensor, x: Tensor, output_1: Tensor) -> Tensor:
        return first * x.cos() + second * output_1

    op = torchop.custom_op(f"{namespace}::op", waves, mutates_args=())
    op.register_autograd(backward_kernel=kernel)
    x = torch.tensor([0.5], requires_grad=True)
    for index, expected in enumerate((x.cos(), x.exp())):
        assert_close(torch.autograd.grad(op(x)[index], x)[0], expected.detach())


def test_a_gradient_that_looks_like_nothing_that_is_passed(namespace):
    def exponential(x: Tensor) -> Tensor:
        return x.exp()

    def kernel(grad: Tensor, output: Tensor) -> Tensor:
        return grad * output

    op = torchop.custom_op(f"{namespace}::op", exponential, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(backward_kernel=kernel)
    x = torch.tensor([0.5], requires_grad=True)
    assert_close(gradients_of(op, x)[0], x.exp().detach())
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="which the backward kernel does not take") as caught:
        compiled(x)
    assert MissingFakeError.__name__ in repr(caught.getrepr())
    torchop.register_fake(f"{namespace}::op__backward_kernel", lambda grad, output: output + 0)
    assert_close(gradients_of(compiled, x)[0], x.exp().detach())


def test_another_kernel_replaces_the_one_before(namespace):
    op = define(namespace)

    def doubled(grad: Tensor, x: Tensor, softmax: Tensor) -> tuple[Tensor, Tensor | None]:
        return 2 * grad.unsqueeze(-1) * softmax, None

    op.register_autograd(backward_kernel=doubled)
    x = X.clone().requires_grad_()
    assert_close(gradients_of(op, x)[0], 2 * X.softmax(-1))


def no_place(grad: Tensor, y: Tensor) -> tuple[Tensor, Tensor]: ...
def too_few(grad: Tensor, x: Tensor) -> Tensor: ...
def no_types(grad, x) -> tuple[Tensor, Tensor]: ...
def returns_numbers(grad: Tensor, x: Tensor) -> tuple[Tensor, float]: ...


WRONG = {
    no_place: "the parameter 'y' is neither an argument, nor a residual, nor the output",
    too_few: r"return a Tensor for each tensor of the arguments \(x, w\)",
    no_types: "parameter 'grad' must have a type annotation",
    returns_numbers: r"return a Tensor for each tensor of the arguments \(x, w\)",
}


@pytest.mark.parametrize("kernel", WRONG, ids=lambda kernel: kernel.__name__)
def test_wrong_kernels(namespace, kernel):
    with pytest.raises(RuleSignatureError, match=WRONG[kernel]):
        define(namespace, kernel)
    assert not hasattr(getattr(torch.ops, namespace), "op__backward_kernel")


def test_a_kernel_beside_a_formula(namespace):
    op = define(namespace)
    with pytest.raises(RuleSignatureError, match="takes a backward_kernel, or backward"):
        op.register_autograd(lambda ctx, grad: grad, backward_kernel=in_numpy)
