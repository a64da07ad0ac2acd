import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.testing import assert_close

import torchop
from tests._support.common import on_both
from tests.rules.support import save_inputs

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)


def cube(namespace, library=torchop):
    """Define `ns::cube`, whose formula calls operators of PyTorch."""

    @library.custom_op(f"{namespace}::cube", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x**3

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2

    op.register_autograd(backward, setup_context=save_inputs)
    op.register_vmap(lambda info, in_dims, x: (op(x), in_dims[0]))
    return op


def sine(namespace, library=torchop):
    """Define `ns::sine` and `ns::cosine`, whose formulas call each other."""

    @library.custom_op(f"{namespace}::sine", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x.sin()

    @library.custom_op(f"{namespace}::cosine", mutates_args=())
    def derivative(x: Tensor) -> Tensor:
        return x.cos()

    op.register_autograd(
        lambda ctx, grad: grad * derivative(ctx.saved_tensors[0]), setup_context=save_inputs
    )
    derivative.register_autograd(
        lambda ctx, grad: -grad * op(ctx.saved_tensors[0]), setup_context=save_inputs
    )
    for each in (op, derivative):
        each.register_vmap(lambda info, in_dims, x, each=each: (each(x), in_dims[0]))
    return op


def without_formula(namespace):
    @torchop.custom_op(f"{namespace}::plain", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x**3

    return op


MAKERS = pytest.mark.parametrize(
    ("make", "reference"), [(cube, lambda x: x**3), (sine, torch.sin)], ids=["cube", "sine"]
)

TRANSFORMS = {
    "grad": lambda f: grad(lambda x: f(x).sum()),
    "vjp": lambda f: lambda x: vjp(f, x)[1](torch.ones_like(x))[0],
    "jacrev": jacrev,
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f)),
    "vmap(grad)": lambda f: vmap(grad(f)),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum()),
    "grad(grad)": lambda f: vmap(grad(grad(f))),
    "grad(grad(grad))": lambda f: vmap(grad(grad(grad(f)))),
    "jacrev(jacrev(jacrev))": lambda f: jacrev(jacrev(jacrev(f))),
    "vmap(vmap(grad))": lambda f: lambda x: vmap(vmap(grad(f)))(x.expand(2, 3)),
    "grad(vmap(grad))": lambda f: grad(lambda x: vmap(grad(f))(x).sum()),
    "vmap(grad(vmap))": lambda f: lambda x: vmap(grad(lambda y: vmap(f)(y).sum()))(x.expand(2, 3)),
}


@MAKERS
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_differentiate_an_operator_like_its_reference(
    namespace, make, reference, transform
):
    def scenario(library, namespace):
        return transform(make(namespace, library))(X)

    both = on_both(scenario, namespace)
    assert_close(both.ours, transform(reference)(X))
    assert isinstance(both.stock, RuntimeError)


def listed(namespace):
    """Define an operator that returns squares and their sum. Its lists may contain None."""

    @torchop.custom_op(f"{namespace}::listed", mutates_args=())
    def op(xs: list[Tensor | None], scale: float = 1.0) -> tuple[list[Tensor], Tensor]:
        squares = [x * x * scale for x in xs if x is not None]
        return squares, torch.stack(squares).sum(0)

    def setup_context(ctx, inputs, output):
        ctx.present = [x is not None for x in inputs[0]]
        ctx.save_for_backward(*(x for x in inputs[0] if x is not None))
        ctx.scale = inputs[1]

    def backward(ctx, grads, grad):
        terms = iter(zip(grads, ctx.saved_tensors, strict=True))
        gradients = []
        for present in ctx.present:
            if present:
                gradient, x = next(terms)
                gradients.append((gradient + grad) * 2 * x * ctx.scale)
            else:
                gradients.append(None)
        return gradients, None

    op.register_autograd(backward, setup_context=setup_context)

    @op.register_vmap
    def _(info, in_dims, xs, scale):
        assert in_dims == ([None, 0, 0], None)
        return op(xs, scale), 0

    return op


def listed_reference(xs, scale=1.0):
    squares = [x * x * scale for x in xs if x is not None]
    return squares, torch.stack(squares).sum(0)


def loss_of(function):
    def loss(x):
        squares, total = function([None, x, x * 2], 3.0)
        return (squares[0] * 5 + squares[1] * 7 + total).sum()

    return loss


LIST_TRANSFORMS = {
    "grad": grad,
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f)),
    "jacrev(jacrev(jacrev))": lambda f: jacrev(jacrev(jacrev(f))),
    "vmap(grad)": lambda f: lambda x: vmap(grad(f))(torch.stack([x, x + 1])),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(torch.stack([x, x + 1])).sum()),
    "vmap(jacrev(jacrev))": lambda f: lambda x: vmap(jacrev(jacrev(f)))(torch.stack([x, x + 1])),
}


@pytest.mark.parametrize("transform", LIST_TRANSFORMS.values(), ids=LIST_TRANSFORMS)
def test_transforms_differentiate_lists_like_their_reference(namespace, transform):
    derived = transform(loss_of(listed(namespace)))
    assert_close(derived(X), transform(loss_of(listed_reference))(X))


def test_transform_inside_of_ordinary_autograd(namespace):
    op = cube(namespace)
    x = X.clone().requires_grad_()
    grad(lambda y: op(y).sum())(x).sum().backward()
    assert_close(x.grad, 6 * X)


def test_gradient_with_regard_to_one_of_two_levels(namespace):
    op = cube(namespace)
    outer = grad(lambda x: grad(lambda y: (op(x) * op(y)).sum())(x).sum())
    assert_close(outer(X), grad(lambda x: grad(lambda y: (x**3 * y**3).sum())(x).sum())(X))


def test_transform_of_a_call_that_does_not_depend_on_the_level(namespace):
    op = cube(namespace)
    assert_close(grad(lambda x: (x * op(X)).sum())(X), X**3)


def test_transform_without_a_formula_raises_with_the_fix(namespace):
    op = without_formula(namespace)
    with pytest.raises(RuntimeError, match=f"{op.name} but no autograd formula"):
        grad(lambda x: op(x).sum())(X)


@pytest.mark.parametrize(
    "transform", [grad, jacrev, lambda f: vmap(grad(f))], ids=["grad", "jacrev", "vmap(grad)"]
)
def test_transform_does_not_differentiate_past_a_mutation(namespace, transform):
    @torchop.custom_op(f"{namespace}::double", mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.mul_(2)

    def doubled(x):
        y = x.clone()
        op(y)
        return y.sum()

    op.register_vmap(lambda info, in_dims, x: (op(x), None))
    assert doubled(X) == (2 * X).sum()
    with pytest.raises(RuntimeError, match=f"{namespace}::double: .*mutates x, so the gradient"):
        transform(doubled)(X)
    assert_close(grad(lambda x: doubled(X) * x.sum())(X), doubled(X).expand(3))


def test_per_sample_gradients_equal_a_loop(namespace):
    op = cube(namespace)
    batch = torch.randn(5, 3, dtype=torch.float64)

    def loss(weight, sample):
        return op(weight * sample).sum()

    together = vmap(grad(loss), (None, 0))(X, batch)
    assert_close(together, torch.stack([grad(loss)(X, sample) for sample in batch]))


# --------------------------------------------------------------------------------------------------
# Forward mode without a formula raises, because a tangent of zero would be wrong


def dual(function, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


FORWARD_MODES = {
    "jvp": lambda f: jvp(f, (X,), (torch.ones_like(X),))[1],
    "jacfwd": lambda f: jacfwd(f)(X),
    "hessian": lambda f: hessian(lambda x: f(x).sum())(X),
    "dual": lambda f: dual(f, X),
    "dual that requires grad": lambda f: dual(f, X.clone().requires_grad_()),
    "dual without recording": lambda f: torch.no_grad()(dual)(f, X.clone().requires_grad_()),
    "jvp of grad": lambda f: jvp(grad(lambda x: f(x).sum()), (X,), (torch.ones_like(X),))[1],
    "grad of jvp": lambda f: grad(lambda x: jvp(f, (x,), (X,))[1].sum())(X),
}


@pytest.mark.parametrize("derive", FORWARD_MODES.values(), ids=FORWARD_MODES)
@pytest.mark.parametrize("has_formula", [True, False], ids=["formula", "no formula"])
def test_forward_mode_is_refused(namespace, derive, has_formula):
    op = cube(namespace)
    if not has_formula:
        op = without_formula(namespace)
    with pytest.raises(NotImplementedError, match="does not support forward-mode") as caught:
        derive(op)
    assert isinstance(caught.value, torchop.ForwardModeError)
    assert namespace in str(caught.value)


def test_forward_mode_raises_instead_of_dropping_the_tangent(namespace):
    def scenario(library, namespace):
        return jvp(cube(namespace, library), (X,), (torch.ones_like(X),))[1]

    both = on_both(scenario, namespace)
    assert isinstance(both.ours, torchop.ForwardModeError)
    assert both.stock.abs().sum() == 0


def test_tangent_in_a_list_is_refused(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(xs: list[Tensor], y: Tensor | None = None) -> Tensor:
        return xs[0].clone()

    with pytest.raises(torchop.ForwardModeError, match=f"{namespace}::op"):
        dual(lambda x: op([X, x]), X)
    with pytest.raises(torchop.ForwardModeError, match=f"{namespace}::op"):
        dual(lambda x: op([X], x), X)


def test_call_without_tangents_inside_forward_mode_runs(namespace):
    op = cube(namespace)
    tangent = jvp(lambda x: x * op(X), (X,), (torch.ones_like(X),))[1]
    assert_close(tangent, X**3)
