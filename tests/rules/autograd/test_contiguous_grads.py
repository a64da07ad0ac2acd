"""The option contiguous_grads is for formulas that read a gradient's memory and ignore strides."""

import contextlib
from typing import Annotated

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import needs_native
from tests._support.devices import DEVICE
from tests.native.gradients.recording import all_native
from tests.rules.support import save_inputs

X, W = (torch.arange(12.0, dtype=torch.double).reshape(3, 4).sin() + n for n in (2, 3))


def product(x: Tensor, w: Tensor) -> Tensor:
    return x * w


def in_rows(grad: Tensor) -> Tensor:
    """Read the gradient like a kernel that only gets its address and shape."""
    memory = torch.empty(0, dtype=grad.dtype).set_(grad.untyped_storage())
    assert memory.numel() >= grad.storage_offset() + grad.numel(), "read beyond the gradient"
    strides = torch.empty(grad.shape, device="meta").stride()
    return memory.as_strided(grad.shape, strides, grad.storage_offset()).clone()


def kernel(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    grad = in_rows(grad)
    return grad * w, grad * x


def formula(ctx, grad):
    grad = in_rows(grad)
    x, w = ctx.saved_tensors
    return grad * w, grad * x


def define(namespace, name="op"):
    op = torchop.custom_op(f"{namespace}::{name}", product, mutates_args=())
    op.register_fake(lambda x, w: torch.empty_like(x))
    return op


def with_formula(namespace, **options):
    op = define(namespace)
    op.register_autograd(formula, setup_context=save_inputs, **options)
    return op


def with_kernel(namespace, **options):
    op = define(namespace)
    op.register_autograd(backward_kernel=kernel, **options)
    return op


def with_operator(namespace, **options):
    """Define an operator whose formula calls a second operator, as in most packages."""
    backward = torchop.custom_op(f"{namespace}::backward", kernel, mutates_args=())
    backward.register_fake(lambda grad, x, w: (torch.empty_like(x), torch.empty_like(w)))
    op = define(namespace)
    op.register_autograd(
        lambda ctx, grad: backward(grad, *ctx.saved_tensors), setup_context=save_inputs, **options
    )
    return op


def of_torch_library(namespace, **options):
    op = torch.library.custom_op(f"{namespace}::op", product, mutates_args=())
    op.register_fake(lambda x, w: torch.empty_like(x))
    torchop.register_autograd(op, formula, setup_context=save_inputs, **options)
    return op


def with_residuals(namespace, **options):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, w: Tensor) -> Annotated[Tensor, torchop.Residuals(both=Tensor)]:
        return torchop.residuals(x * w, torch.stack([x, w]))

    op.register_fake(lambda x, w: torchop.residuals(torch.empty_like(x), x.new_empty(2, *x.shape)))

    def of_residuals(grad: Tensor, both: Tensor) -> tuple[Tensor, Tensor]:
        return kernel(grad, *both)

    op.register_autograd(backward_kernel=of_residuals, **options)
    torchop.register_fake(
        f"{namespace}::op__backward_kernel",
        lambda grad, both: (torch.empty_like(both[0]), torch.empty_like(both[1])),
    )
    return op


def of_class(namespace, **options):
    class Operator:
        @staticmethod
        def forward(x: Tensor, w: Tensor) -> Tensor:
            return x * w

        fake = {"like": "x"}  # noqa: RUF012
        backward_kernel = staticmethod(kernel)

    for name, value in options.items():
        setattr(Operator, name, value)
    return torchop.operator(f"{namespace}::op")(Operator)


# Compilers can trace these formulas. The other formulas read data, which raises in a trace.
TRACEABLE = [with_kernel, with_operator, with_residuals, of_class]
EVERY = [*TRACEABLE, with_formula, of_torch_library]

LOSSES = {
    "contiguous": lambda y: (y * X).sum(),
    "expanded": lambda y: y.sum(),
    "expanded rows": lambda y: (y.sum(0) * X[0]).sum(),
    "narrowed": lambda y: (torch.cat([y, X], 1) * torch.arange(8.0)).sum(),
    "transposed": lambda y: (y.t().contiguous() * torch.arange(3.0)).sum(),
    "offset": lambda y: (torch.cat([X, y]) * torch.arange(24.0).reshape(6, 4)).sum(),
}


def gradients_of(function, loss, *values):
    inputs = [value.clone().requires_grad_() for value in values]
    return torch.autograd.grad(loss(function(*inputs)), inputs)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("make", EVERY)
def test_every_gradient_is_contiguous(namespace, make, loss):
    op = make(namespace, contiguous_grads=True)
    expected = gradients_of(product, loss, X, W)
    for _ in range(2):
        assert_close(gradients_of(op, loss, X, W), expected)
    with torchop.native.disabled():
        assert_close(gradients_of(op, loss, X, W), expected)


@pytest.mark.parametrize("make", EVERY)
def test_formulas_get_gradients_as_they_are_by_default(namespace, make):
    """Without the option, the gradients are wrong. This shows that the other tests can fail."""
    op = make(namespace)
    expected = gradients_of(product, LOSSES["transposed"], X, W)
    with pytest.raises(AssertionError):
        assert_close(gradients_of(op, LOSSES["transposed"], X, W), expected)


@pytest.mark.parametrize(
    ("make", "backend"),
    [*((make, "aot_eager") for make in TRACEABLE), (with_kernel, "inductor")],
)
def test_in_compiled_graphs(namespace, make, backend):
    op = make(namespace, contiguous_grads=True)
    names = ("expanded", "narrowed", "transposed") if make is TRACEABLE[0] else ("transposed",)
    for loss in map(LOSSES.__getitem__, names):
        torch._dynamo.reset()
        expected = gradients_of(product, loss, X, W)
        compiled = torch.compile(
            lambda x, w, loss=loss: loss(op(x, w)), backend=backend, fullgraph=True, dynamic=True
        )
        assert_close(gradients_of(compiled, lambda y: y, X, W), expected)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("make", [with_kernel, with_operator])
def test_in_transforms(namespace, make, loss):
    op = make(namespace, contiguous_grads=True)

    def both(function):
        of_one = torch.func.grad(lambda x, w: loss(function(x, w)), argnums=(0, 1))
        batched = torch.func.vmap(of_one, in_dims=(2, None))
        return (*of_one(X, W), *batched(torch.stack([X, 2 * X], -1), W))

    assert_close(both(op), both(product))


def test_lists_of_gradients_and_undefined_gradients(namespace):
    seen = []

    def rows(x: Tensor) -> tuple[list[Tensor], Tensor, Tensor]:
        return [x.clone(), x * 2, x * 5], x * 3, x * 4

    op = torchop.custom_op(f"{namespace}::op", rows, mutates_args=())

    def setup_context(ctx, inputs, output):
        ctx.set_materialize_grads(False)

    def backward(ctx, grads, grad, undefined):
        assert type(grads) is list
        assert grads[1] is None
        assert undefined is None
        seen.extend(g.is_contiguous() for g in (grads[0], grads[2], grad))
        return in_rows(grads[0]) + 5 * in_rows(grads[2]) + 3 * in_rows(grad)

    op.register_autograd(backward, setup_context=setup_context, contiguous_grads=True)
    x = X.clone().requires_grad_()
    for _ in range(2):
        (one, _, five), three, _ = op(x)
        total = one.sum() + LOSSES["transposed"](five) + LOSSES["transposed"](three)
        (gradient,) = torch.autograd.grad(total, x)
        expected = 1 + 8 * torch.arange(3.0, dtype=torch.double)[:, None].expand(3, 4)
        assert_close(gradient, expected)
    assert seen == [True] * 6


@needs_native
def test_a_contiguous_gradient_is_passed_as_it_is(namespace):
    """The formula gets a contiguous gradient itself, not a copy, also after a native call."""
    seen = []
    op = define(namespace)
    op.register_autograd(lambda ctx, grad: (seen.append(grad), None)[1:] * 2, contiguous_grads=True)
    x = X.clone().requires_grad_()
    op(x, W)
    grad = torch.ones_like(X)
    with all_native(op):
        y = op(x, W)
    y.grad_fn.apply(grad)
    y.grad_fn.apply(None)
    assert seen[0] is grad
    assert len(seen) == 2


@pytest.mark.parametrize("native", [True, False])
def test_lazily_conjugated_and_negated_gradients_are_resolved(namespace, native):
    """A kernel that reads memory ignores the conjugate and negative bits of a tensor."""
    seen = []

    def backward(ctx, grad):
        # `numpy()` raises for a tensor whose conjugate or negative bit is set.
        seen.append(torch.tensor(grad.detach().numpy()))
        return grad

    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x.clone(), schema="(Tensor x) -> Tensor", mutates_args=()
    )
    op.register_autograd(backward, contiguous_grads=True)
    x = torch.ones(3, dtype=torch.complex64, requires_grad=True)
    op(x)
    with contextlib.nullcontext() if native else torchop.native.disabled():
        y = op(x)
    grad = torch.complex(torch.ones(3), torch.full((3,), 2.0))
    for lazy in (grad.conj(), torch._neg_view(grad)):
        y.backward(lazy, retain_graph=True)
        assert_close(seen.pop(), lazy.resolve_conj().resolve_neg())


def test_sparse_gradients_are_passed_as_they_are(namespace):
    seen = []

    def backward(ctx, grad):
        seen.append(grad.layout)
        return grad.to_dense()

    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x.to_sparse(), schema="(Tensor x) -> Tensor", mutates_args=()
    )
    op.register_autograd(backward, contiguous_grads=True)
    x = torch.eye(3, device=DEVICE, requires_grad=True)
    for _ in range(2):
        torch.autograd.grad(op(x), x, torch.eye(3, device=DEVICE).to_sparse())
    assert seen == [torch.sparse_coo] * 2


def test_the_formula_of_a_graph_is_part_of_its_key(namespace):
    op = with_formula(namespace)
    before = torchop.cache_key_tag()
    op.register_autograd(formula, setup_context=save_inputs, contiguous_grads=True)
    with_copies = torchop.cache_key_tag()
    assert before != with_copies
    op.register_autograd(lambda ctx, g: (g, None), contiguous_grads=True)
    assert torchop.cache_key_tag() not in (before, with_copies)


def test_notes_name_the_setup_context_of_the_author(namespace):
    op = define(namespace)
    op.register_autograd(lambda ctx, grad: ctx.saved_tensors[0], contiguous_grads=True)
    y = op(X.clone().requires_grad_(), W)
    with pytest.raises(IndexError) as caught:
        y.sum().backward()
    assert "has no setup_context" in "".join(caught.value.__notes__)
