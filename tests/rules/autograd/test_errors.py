"""Formulas that read data work in eager calls. Elsewhere, they raise an error that says why."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed, TorchRuntimeError
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor

import torchop
from tests._support.opaque_types import Reference
from tests.rules.support import save_inputs
from tests.rules.user.sharding import ranks
from torchop import TracingError

X, W = torch.arange(6.0).reshape(2, 3).sin(), torch.arange(3.0).cos()


def product(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def in_numpy(ctx, grad):
    x, w = ctx.saved_tensors
    product = grad.numpy() * x.numpy()
    return torch.from_numpy(grad.numpy() * w.numpy()), torch.from_numpy(product.sum(0))


def with_lists(ctx, grad):
    x, w = (torch.tensor(each.tolist()) for each in ctx.saved_tensors)
    return grad * w, (grad * x).sum(0)


def in_setup_context(ctx, inputs, output):
    ctx.arrays = [value.detach().numpy() for value in inputs]


def of_arrays(ctx, grad):
    x, w = ctx.arrays
    return grad * torch.from_numpy(w), (grad * torch.from_numpy(x)).sum(0)


FORMULAS = {
    "numpy": (in_numpy, save_inputs),
    "tolist": (with_lists, save_inputs),
    "setup_context": (of_arrays, in_setup_context),
}


def define(namespace, backward=in_numpy, setup_context=save_inputs):
    op = torchop.custom_op(f"{namespace}::op", product, mutates_args=())
    op.register_fake(lambda x, w: torch.empty_like(x))
    op.register_sharding("... d, d -> ... d")
    op.register_vmap("sequential")
    op.register_autograd(backward, setup_context=setup_context)
    return op


def leaves() -> tuple[Tensor, Tensor]:
    return X.clone().requires_grad_(), W.clone().requires_grad_()


def trained(op) -> None:
    op(*leaves()).sum().backward()


def compiled(op) -> None:
    trained(torch.compile(op, backend="aot_eager", fullgraph=True))


def exported(op) -> None:
    class Step(torch.nn.Module):
        def forward(self, x, w):
            return torch.autograd.grad(op(x, w).sum(), x)

    torch.export.export(Step(), leaves(), strict=False)


def transformed(op) -> None:
    torch.func.grad(lambda x: op(x, W).sum())(X)


def applied_later(op) -> None:
    """Run the formula with saved tensors from a transform, and with a gradient from outside it."""
    _, pull_back = torch.func.vjp(lambda x: op(x, W), X)
    pull_back(torch.ones(2, 3))


def mapped(op) -> None:
    torch.vmap(torch.func.grad(lambda x: op(x, W).sum()))(X)


def batched(op) -> None:
    x, w = leaves()
    torch.autograd.grad(op(x, w), x, torch.ones(2, 2, 3), is_grads_batched=True)


@contextmanager
def sharded() -> Iterator[tuple[Tensor, Tensor]]:
    from torch.distributed.tensor import Replicate, Shard

    with ranks.simulated_mesh((2,)) as mesh:
        x = ranks.placed(X, mesh, [Shard(0)])
        w = ranks.placed(W, mesh, [Replicate()])
        yield x.requires_grad_(), w.requires_grad_()


def on_dtensors(op) -> None:
    with sharded() as (x, w):
        op(x, w).sum().backward()


def in_a_subclass(op) -> None:
    op(TwoTensor(X, X).requires_grad_(), W).sum().backward()


# Maps a way to run the formula to the words by which the error message describes this way.
WAYS = {
    compiled: "in a compiler's trace",
    exported: "in a compiler's trace",
    transformed: "in a transform of torch.func",
    applied_later: "in a transform of torch.func",
    mapped: "in a transform of torch.func",
    batched: "on a batch of gradients",
    on_dtensors: "on a DTensor",
    in_a_subclass: "on a TwoTensor",
}
# These combinations of a formula and a way to run it raise no error, because all tensors that the
# formula reads have data: `tolist` works under torch.func.grad, and if only the gradients are
# batched, the saved tensors are ordinary ones.
ALLOWED = {
    (with_lists, transformed),
    (with_lists, applied_later),
    (with_lists, batched),
    (of_arrays, batched),
}
# Compilers wrap the formula's exception in an exception of their own.
ERRORS = (TracingError, BackendCompilerFailed, TorchRuntimeError)


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
def test_eager_calls_work(namespace, formula):
    op = define(namespace, *formula)
    expected = torch.autograd.grad(product(*(both := leaves())).sum(), both)
    for _ in range(2):
        assert_close(torch.autograd.grad(op(*(both := leaves())).sum(), both), expected)


@pytest.mark.parametrize(
    ("formula", "way"),
    [(name, way) for name in FORMULAS for way in WAYS if (FORMULAS[name][0], way) not in ALLOWED],
)
def test_other_calls_raise_with_example_code(namespace, formula, way):
    op = define(namespace, *FORMULAS[formula])
    with pytest.raises(ERRORS) as caught:
        way(op)
    message = str(caught.value)
    assert f"{namespace}::op: the " in message
    assert f" cannot run {WAYS[way]}, because it read the data of a tensor" in message
    assert "def backward(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor | None, " in message
    assert f"torchop.register_autograd('{namespace}::op', backward_kernel=backward)" in message


def kernel(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    gradients = grad.numpy() * w.numpy(), (grad.numpy() * x.numpy()).reshape(-1, 3).sum(0)
    return torch.from_numpy(gradients[0]), torch.from_numpy(gradients[1])


@pytest.mark.parametrize(
    "way", [way for way in WAYS if way is not in_a_subclass], ids=lambda way: way.__name__
)
def test_backward_kernel_makes_these_formulas_work(namespace, way):
    op = define(namespace)
    op.register_autograd(backward_kernel=kernel)
    way(op)


@dataclass
class Config:
    scale: Tensor
    power: int


def structured(x: Tensor, config: Config) -> Tensor:
    return x**config.power * config.scale


def several(xs: list[Tensor | None], y: Tensor | None, n: int) -> tuple[Tensor, list[Tensor], int]:
    return xs[0] * n, [xs[0] * 2], n


def of_several(ctx, grad, grads, _):
    return [torch.from_numpy(grad.numpy()), None], None, None


@pytest.mark.parametrize(
    ("function", "backward", "args", "parameters"),
    [
        (
            structured,
            lambda ctx, grad: (grad.numpy(),),
            (X, Config(X, 2)),
            "x: torch.Tensor, config: ",
        ),
        (several, of_several, ([X, None], None, 3), "xs: list[Tensor | None], y: Tensor | None"),
    ],
)
def test_the_lines_can_be_registered(namespace, function, backward, args, parameters):
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_autograd(backward)

    def first(x):
        x = [x, None] if isinstance(args[0], list) else x
        result = op(x, *args[1:])
        return (result[0] if isinstance(result, tuple) else result).sum()

    with pytest.raises(TracingError) as caught:
        torch.func.grad(first)(X)
    assert parameters in str(caught.value)
    lines = str(caught.value).partition("to save:\n\n")[2].replace("    ", "")
    names = {"Tensor": Tensor, "torch": torch, "np": np, "torchop": torchop, __name__: None}
    names["__name__"] = __name__  # code of another package would replace the formula with a warning
    names[__name__.partition(".")[0]] = __import__(__name__.partition(".")[0])
    exec(lines, names)
    assert hasattr(getattr(torch.ops, namespace), "op__backward_kernel")


# --------------------------------------------------------------------------------------------------
# Attributes of opaque objects


def maximum(x: Tensor) -> tuple[Tensor, Reference]:
    return x * x.max().item(), Reference(int(x.max()))


def times(x: Tensor, factor: Reference) -> Tensor:
    return x * factor.number


def with_opaque_result(namespace, backward, setup_context):
    op = torchop.custom_op(f"{namespace}::maximum", maximum, mutates_args=())
    op.register_fake(lambda x: (torch.empty_like(x), Reference(0)))
    op.register_autograd(backward, setup_context=setup_context)
    return op


def save_object(ctx, inputs, output):
    ctx.factor = output[1]


def save_number(ctx, inputs, output):
    ctx.number = output[1].number


ATTRIBUTE_READERS = {
    "backward formula": (lambda ctx, grad, _: grad * ctx.factor.number, save_object),
    "setup_context": (lambda ctx, grad, _: grad * ctx.number, save_number),
}


@pytest.mark.parametrize("part", ATTRIBUTE_READERS)
def test_attributes_of_opaque_results_have_no_value_in_a_trace(namespace: str, part: str) -> None:
    op = with_opaque_result(namespace, *ATTRIBUTE_READERS[part])
    x = torch.full((2,), 3.0, requires_grad=True)
    op(x)[0].sum().backward()
    assert_close(x.grad, torch.full((2,), 3.0))
    message = f"{namespace}::maximum: the {part} .* the attribute 'number' of an opaque object"
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(op, backend="aot_eager", fullgraph=True)(x)


def test_formulas_can_pass_opaque_results_to_operators_in_a_trace(namespace: str) -> None:
    multiply = torchop.custom_op(f"{namespace}::times", times, mutates_args=())
    multiply.register_fake(lambda x, factor: torch.empty_like(x))
    op = with_opaque_result(namespace, lambda ctx, grad, _: multiply(grad, ctx.factor), save_object)
    compiled = torch.compile(lambda x: op(x)[0], backend="aot_eager", fullgraph=True)
    for value in (3.0, 5.0):  # the second call runs the same graph
        x = torch.full((2,), value, requires_grad=True)
        compiled(x).sum().backward()
        assert_close(x.grad, torch.full((2,), value))


def test_attributes_of_opaque_arguments_have_no_value_in_a_trace(namespace: str) -> None:
    multiply = torchop.custom_op(f"{namespace}::times", times, mutates_args=())
    multiply.register_fake(lambda x, factor: torch.empty_like(x))

    def save_factor(ctx, inputs, output):
        ctx.factor = inputs[1]

    multiply.register_autograd(
        lambda ctx, grad: (grad * ctx.factor.number, None), setup_context=save_factor
    )
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(BackendCompilerFailed, match=f"{namespace}::times: .*'number'"):
        torch.compile(multiply, backend="aot_eager", fullgraph=True)(x, Reference(3))


def energy(x: Tensor) -> Tensor:
    return x.square().sum()


def forces_by_autograd(x: Tensor) -> Tensor:
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        return torch.autograd.grad(energy(x), x)[0]


def forces_by_func(x: Tensor) -> Tensor:
    return torch.func.grad(energy)(x)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_autograd_in_a_kernel_raises_with_the_fix(namespace, native, requires_grad):
    op = torchop.custom_op(f"{namespace}::forces", forces_by_autograd, mutates_args=())
    x = X.clone().requires_grad_(requires_grad)
    disabled = nullcontext() if native else torchop.native.disabled()
    with disabled, pytest.raises(RuntimeError, match="does not require grad") as raised:
        op(x)
    text = " ".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert f"in the kernel of {namespace}::forces" in text
    assert "torch.func.grad" in text


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_a_kernel_may_use_func_grad(namespace, backend):
    op = torchop.custom_op(f"{namespace}::forces", forces_by_func, mutates_args=())
    op.register_fake(torch.empty_like)
    op.register_autograd(lambda ctx, grad: 2 * grad)
    x = X.clone().requires_grad_()
    function = torch.compile(op, backend=backend, fullgraph=True) if backend else op
    y = function(x)
    assert_close(y, 2 * x)
    assert_close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 2.0))
