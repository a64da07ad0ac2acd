"""Opaque formulas: a backward that cannot be traced, as an operator."""

import enum

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.devices import BACKEND
from tests.rules.support import leaf_of
from tests.support import counting, needs_native
from torchop import (
    BackwardNotTraceableError,
    DerivedFormulaError,
    GradientError,
    MissingFormulaError,
    OpaqueBackwardError,
)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def cube(name, *, opaque=True, setup_context=None, backward=None):
    """`x**3`, whose backward uses NumPy."""

    @torchop.custom_op(name, mutates_args=())
    def op(x: Tensor, scale: float = 1.0) -> Tensor:
        return x**3 * scale

    op.register_fake(lambda x, scale=1.0: torch.empty_like(x))

    def save(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])
        ctx.scale = inputs[1]

    def with_numpy(ctx, grad):
        (x,) = ctx.saved_tensors
        gradient = grad.numpy() * 3 * x.detach().numpy() ** 2 * ctx.scale
        return torch.as_tensor(gradient), None

    op.register_autograd(backward or with_numpy, setup_context=setup_context or save, opaque=opaque)
    return op


def test_a_backward_with_numpy_trains_in_eager_mode_and_compiled(namespace):
    op = cube(f"{namespace}::f")
    x = leaf_of(1.0, 2.0)
    op(x, 2.0).sum().backward()
    assert_close(x.grad, 6 * x.detach() ** 2)

    (gradient,) = torch.autograd.grad(compiled(lambda x: op(x, 2.0) * x)(x).sum(), x)
    assert_close(gradient, 8 * x.detach() ** 3)
    assert torch.autograd.gradcheck(compiled(lambda x: op(x, 2.0)), x)
    assert "autograd (opaque)" in repr(op)


def test_without_the_word_it_cannot_be_compiled(namespace):
    op = cube(f"{namespace}::f", opaque=False)
    with pytest.raises((BackwardNotTraceableError, RuntimeError), match="cannot be traced"):
        compiled(op)(leaf_of(1.0)).sum().backward()


@needs_native
def test_native_calls_stay_native(namespace):
    op = cube(f"{namespace}::f")
    x = leaf_of(1.0)
    op(x)
    with counting(op) as calls:
        op(x).backward()
    assert calls == {"native": 1}
    assert_close(x.grad, 3 * x.detach() ** 2)


def test_what_is_on_ctx_reaches_the_backward(namespace):
    seen = []

    def setup_context(ctx, inputs, output):
        x = inputs[0]
        ctx.save_for_backward(x, None)
        ctx.other = output
        ctx.size = x.shape
        ctx.numbers = (1, 2.5, True, None, "word", [3, "\n"])
        ctx.dtype, ctx.device = x.dtype, x.device
        ctx.infinite = float("inf")

    def backward(ctx, grad):
        _, missing = ctx.saved_tensors
        seen.append(
            (ctx.size, ctx.numbers, ctx.dtype, ctx.device, ctx.infinite, missing, ctx.other is None)
        )
        seen.append(ctx.needs_input_grad)
        return torch.from_numpy(grad.numpy() * 2), None

    op = cube(f"{namespace}::f", setup_context=setup_context, backward=backward)
    x = leaf_of(1.0, 2.0)
    op(x).sum().backward()
    compiled(op)(x).sum().backward()
    assert seen[0] == seen[2]
    assert seen[1] == seen[3] == (True, False)
    assert type(seen[2][0]) is torch.Size
    assert seen[2][1] == (1, 2.5, True, None, "word", [3, "\n"])
    assert_close(x.grad, torch.full_like(x, 4))


class Kind(enum.IntEnum):
    FULL = 1


@pytest.mark.parametrize(("cache", "kind"), [({"a": 1}, "dict"), ((1, [Kind.FULL]), "Kind")])
def test_what_no_schema_can_hold_is_refused(namespace, cache, kind):
    def setup_context(ctx, inputs, output):
        ctx.cache = cache

    op = cube(
        f"{namespace}::f", setup_context=setup_context, backward=lambda ctx, grad: (grad, None)
    )
    x = leaf_of(1.0)
    op(x).backward()  # eager mode passes it on
    message = rf"{OpaqueBackwardError.__name__}: .*::f: .*ctx\.cache is .*Got a {kind}"
    with pytest.raises(RuntimeError, match=message):  # Dynamo raises it again, as its own
        compiled(op)(x).sum().backward()


def test_gradients_that_are_none_or_of_another_layout(namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def op(x: Tensor, others: list[Tensor], y: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x + y, [x * 2, others[0] * 3]

    op.register_fake(
        lambda x, others, y: (
            torch.empty_like(x),
            [torch.empty_like(x)] * 1 + [torch.empty_like(others[0])],
        )
    )

    def backward(ctx, grad, grads):
        grad.numpy()
        return grad + 2 * grads[0], [3 * grads[1], None], None

    op.register_autograd(backward, opaque=True)
    x, a, b, y = (torch.ones(2, 2, requires_grad=True) for _ in range(4))

    def function(x, a, b, y):
        first, rest = op(x.t(), [a, b], y)
        return first.sum() + rest[0].sum() + rest[1].sum()

    gradients = torch.autograd.grad(compiled(function)(x, a, b, y), (x, a, b, y))
    for gradient, value in zip(gradients, (3.0, 3.0, 0.0, 0.0), strict=True):
        assert_close(gradient, torch.full((2, 2), value))


def test_lists_that_hold_no_tensors(namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def op(x: Tensor, factors: list[int], tensors: list[Tensor]) -> Tensor:
        return x * factors[0] + tensors[0]

    op.register_fake(lambda x, factors, tensors: torch.empty_like(x))

    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy() * 2), None, [torch.from_numpy(grad.numpy() * 1)]

    op.register_autograd(backward, opaque=True)
    x, y = leaf_of(1.0), leaf_of(1.0)
    gradients = torch.autograd.grad(compiled(lambda x, y: op(x, [2, 3], [y]))(x, y).sum(), (x, y))
    assert [gradient.item() for gradient in gradients] == [2, 1]


def test_an_operator_in_the_in_place_form(namespace):
    @torchop.custom_op(
        f"{namespace}::f_", mutates_args={"x"}, schema="(Tensor(a!) x, float n) -> Tensor(a!)"
    )
    def op(x: Tensor, n: float) -> Tensor:
        return x.mul_(n)

    def setup_context(ctx, inputs, output):
        ctx.n = inputs[1]

    def backward(ctx, grad):
        return torch.from_numpy(grad.numpy() * ctx.n), None

    op.register_autograd(backward, setup_context=setup_context, opaque=True)
    x = leaf_of(1.0, 2.0)

    def function(x):
        return op(x * 1, 3.0).sum()

    for each in (function, compiled(function)):
        assert_close(torch.autograd.grad(each(x), x)[0], torch.full_like(x, 3))


def test_a_gradient_of_another_shape_is_refused(namespace):
    def backward(ctx, grad):
        grad.numpy()
        return torch.ones(3, 3), None

    op = cube(f"{namespace}::f", backward=backward)
    message = r"gradient of shape \[3, 3\] and torch.float32 for an input of shape \[2\] and"
    with pytest.raises(GradientError, match=message):
        compiled(op)(leaf_of(1.0, 2.0)).sum().backward()


WAYS = {
    "eager": lambda op, x: op(x).backward(),
    "compiled": lambda op, x: compiled(op)(x).backward(),
    "transformed": lambda op, x: torch.func.grad(op)(x.detach()),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_complex_gradient_of_a_real_input_is_refused(namespace, way):
    """Its imaginary part would be lost."""
    op = cube(f"{namespace}::f", backward=lambda ctx, grad: (grad * 1j, None))
    with pytest.raises(GradientError, match="complex128"):
        way(op, torch.tensor(1.0, dtype=torch.double, requires_grad=True))


def test_a_wrong_number_of_gradients_is_refused(namespace):
    def backward(ctx, grad):
        grad.numpy()
        return grad, None, grad

    op = cube(f"{namespace}::f", backward=backward)
    with pytest.raises(GradientError, match="incorrect number of gradients"):
        compiled(op)(leaf_of(1.0, 2.0)).sum().backward()


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func_call_it_too(namespace):
    op = cube(f"{namespace}::f")
    x = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert_close(torch.func.grad(lambda x: op(x).sum())(x), 3 * x**2)
    assert_close(torch.func.jacrev(op)(x), torch.diag(3 * x**2))
    assert_close(torch.vmap(torch.func.grad(op))(x), 3 * x**2)
    with pytest.raises(MissingFormulaError, match=r"f__opaque_backward"):
        torch.func.grad(torch.func.grad(lambda x: op(x).sum()))(x[0])


def test_the_formula_can_be_replaced(namespace):
    op = cube(f"{namespace}::f")
    x = leaf_of(1.0)
    op.register_autograd(lambda ctx, grad: (grad * 5, None), opaque=True)
    assert torch.autograd.grad(compiled(op)(x).sum(), x)[0].item() == 5
    graph = compiled(op)(x)
    torch._dynamo.reset()
    op.register_autograd(lambda ctx, grad: (grad * 6, None))
    assert torch.autograd.grad(graph.sum(), x)[0].item() == 5
    assert torch.autograd.grad(compiled(op)(x).sum(), x)[0].item() == 6


def test_for_an_operator_of_somebody_else(namespace):
    with torch.library._scoped_library(namespace, "DEF") as library:
        library.define("g(Tensor x) -> Tensor")
        library.impl("g", lambda x: x.sin(), BACKEND)
        torchop.register_fake(f"{namespace}::g", torch.empty_like, lib=library)

        def backward(ctx, grad):
            return torch.from_numpy(grad.numpy() * 2)

        torchop.register_autograd(f"{namespace}::g", backward, opaque=True, lib=library)
        op = getattr(torch.ops, namespace).g.default
        x = leaf_of(1.0)
        assert torch.autograd.grad(compiled(op)(x).sum(), x)[0].item() == 2


def test_a_name_that_is_taken_is_not_replaced(namespace):
    torchop.custom_op(
        f"{namespace}::f__opaque_backward",
        lambda x: x + 1,
        schema="(Tensor x)->Tensor",
        mutates_args=(),
    )
    with pytest.raises(DerivedFormulaError, match=r"needs an operator .*f__opaque_backward"):
        cube(f"{namespace}::f")
