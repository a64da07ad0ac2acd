"""The vmap rule of an operator with residuals, in calls that record a gradient."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap
from torch.testing import assert_close

import torchop
from tests._support.devices import TYPE


@dataclasses.dataclass(frozen=True)
class Tapes:
    softmax: Tensor
    nothing: Tensor | None = None


class LogSumExp:
    """An operator with residuals: log-sum-exp over the last dimension.

    It records the calls of its kernel and of its vmap rule.
    """

    def __init__(self, namespace: str) -> None:
        self.kernels: list[tuple[int, ...]] = []
        self.rules: list[bool] = []

        def lse(x: Tensor) -> Annotated[Tensor, torchop.Residuals(softmax=Tensor, sizes=Tensor)]:
            self.kernels.append(tuple(x.shape))
            return torchop.residuals(
                x.logsumexp(-1), x.softmax(-1), torch.tensor([x.shape[-1] / 2, 2.0])
            )

        def fake(x):
            return torchop.residuals(x.new_empty(x.shape[:-1]), torch.empty_like(x), x.new_empty(2))

        def setup_context(ctx, inputs, output, residuals):
            ctx.save_for_backward(*inputs, residuals.softmax, residuals.sizes)

        def backward(ctx, grad):
            x, softmax, sizes = ctx.saved_tensors
            if torch.is_grad_enabled():
                softmax, sizes = x.softmax(-1), sizes.detach()
            return grad.unsqueeze(-1) * softmax * sizes.prod() / x.shape[-1]

        self.name = f"{namespace}::lse"
        self.op = torchop.custom_op(self.name, lse, mutates_args=())
        self.op.register_fake(fake)
        self.op.register_autograd(backward, setup_context=setup_context)

    def rule(self, info: Any, in_dims: Any, x: Tensor) -> Any:
        self.rules.append(torchop.records_gradient())
        return torchop.residuals((self.op(x.movedim(in_dims[0], 0)), 0), 0, None)


@pytest.fixture
def lse(namespace):
    made = LogSumExp(namespace)
    made.op.register_vmap(made.rule)
    return made


def plain(x: Tensor) -> Tensor:
    return x.logsumexp(-1)


X = torch.arange(24.0).reshape(2, 3, 4).sin()
# Maps the name of a transform to a function that applies it, and to the expected values of
# `records_gradient()` in the calls of the vmap rule.
TRANSFORMS: dict[str, Any] = {
    "vmap": (lambda f: vmap(f), [False]),
    "vmap of grad": (lambda f: vmap(vmap(grad(f))), [True, True]),
    "vmap of grad in another dimension": (
        lambda f: lambda x: vmap(vmap(grad(f)), in_dims=2, out_dims=1)(x.mT),
        [True, True],
    ),
    "grad of vmap": (lambda f: grad(lambda x: vmap(f)(x).sum()), [False]),
    "grad of vmap of grad": (
        lambda f: grad(lambda x: vmap(vmap(grad(f)))(x).square().sum()),
        [True, True],
    ),
    "vmap of grad of grad": (
        lambda f: vmap(vmap(grad(lambda x: grad(f)(x).square().sum()))),
        [True, True],
    ),
    "vmap of jacrev": (lambda f: vmap(jacrev(f)), [True]),
    "jacrev of vmap": (lambda f: jacrev(vmap(f)), [False]),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_rule_serves_calls_that_record(lse, transform):
    make, told = TRANSFORMS[transform]
    assert_close(make(lse.op)(X), make(plain)(X))
    assert lse.rules == told
    assert [sorted(shape) for shape in lse.kernels] == [[2, 3, 4]]


@pytest.mark.parametrize("transform", ["vmap of grad", "vmap of jacrev", "grad of vmap of grad"])
def test_compiled(lse, transform):
    make, _ = TRANSFORMS[transform]
    function = torch.compile(make(lse.op), fullgraph=True, backend="aot_eager")
    assert_close(function(X), make(plain)(X))
    assert lse.kernels == [X.shape]


def test_a_batch_of_gradients_is_differentiated_outside(lse):
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    for tensor, function in ((x, lse.op), (y, plain)):
        vmap(vmap(grad(function)))(tensor).square().sum().backward()
    assert_close(x.grad, y.grad)
    assert lse.kernels == [X.shape]


@pytest.mark.parametrize("how", ["handle", "packet", "overload"])
def test_every_way_to_call_the_operator(namespace, how):
    made = LogSumExp(namespace)
    packet = getattr(torch.ops, namespace).lse
    op = {"handle": made.op, "packet": packet, "overload": packet.default}[how]
    made.op.register_vmap(lambda info, in_dims, x: torchop.residuals((op(x), 0), 0, None))
    assert_close(vmap(grad(made.op))(X[0]), vmap(grad(plain))(X[0]))
    assert made.kernels == [X[0].shape]


def test_a_rule_before_the_formula(namespace):
    def cube(x: Tensor) -> Annotated[Tensor, torchop.Residuals(slope=Tensor)]:
        return torchop.residuals(x**3, 3 * x**2)

    op = torchop.custom_op(f"{namespace}::cube", cube, mutates_args=())
    op.register_vmap(lambda info, in_dims, x: torchop.residuals((op(x), 0), 0))
    op.register_autograd(backward_kernel=of_slope)
    shapes = []
    torchop.register_kernel(
        op, TYPE, lambda x: shapes.append(x.shape) or torchop.residuals(x**3, 3 * x**2)
    )
    assert vmap(grad(op))(torch.tensor([1.0, 2.0])).tolist() == [3, 12]
    assert shapes == [(2,)]


def of_slope(grad: Tensor, slope: Tensor) -> Tensor:
    return grad * slope


def test_structures_and_several_results(namespace):
    def scaled(x: Tensor, by: float = 2.0) -> tuple[Tensor, Tensor]:
        return torchop.residuals((x * by, x.sin()), Tapes(x.cos()), [x * 0 + by])

    types = {"tapes": Tapes, "more": list[Tensor]}
    op = torchop.custom_op(f"{namespace}::op", scaled, mutates_args=(), residuals=types)

    def setup_context(ctx, inputs, output, residuals):
        assert residuals.tapes.nothing is None
        ctx.save_for_backward(residuals.tapes.softmax, *residuals.more)

    def backward(ctx, first, second):
        cosine, by = ctx.saved_tensors
        return first * by + second * cosine, None

    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(
        lambda info, in_dims, x, by: torchop.residuals((op(x, by), (0, 0)), {"softmax": 0}, [0])
    )
    x = torch.tensor([1.0, 2.0])
    gradients = vmap(grad(lambda x: sum(op(x, 3.0))))(x)
    assert_close(gradients, 3 + x.cos())


def no_dimensions(op, x):
    return op(x), 0


def too_few_dimensions(op, x):
    return torchop.residuals((op(x), 0), 0)


def several_calls(op, x):
    return torchop.residuals((op(x) + op(x), 0), 0, None)


def no_call(op, x):
    return torchop.residuals((plain(x), 0), 0, None)


@pytest.mark.parametrize(
    ("rule", "calls", "dimensions"),
    [(no_dimensions, 1, 0), (too_few_dimensions, 1, 1), (several_calls, 2, 2), (no_call, 0, 2)],
)
def test_a_rule_without_residual_dimensions_is_rejected(namespace, rule, calls, dimensions):
    made = LogSumExp(namespace)
    made.op.register_vmap(lambda info, in_dims, x: rule(made.op, x))
    assert vmap(made.op)(X[0]).shape == (3,)
    message = (
        rf"^{made.name}: the vmap rule must .*residuals\(\(output, out_dims\), softmax, sizes\), "
        rf".* called the operator {calls} times and returned {dimensions} of 2 dimensions\. .* "
        rf"'{made.name}__with_residuals' .*'sequential'"
    )
    with pytest.raises(torchop.ResultError, match=message):
        vmap(grad(made.op))(X[0])
    assert not torchop.records_gradient()
    torchop.register_vmap(f"{made.name}__with_residuals", "sequential")
    assert_close(vmap(grad(made.op))(X[0]), vmap(grad(plain))(X[0]))
    # Registering the operator's own vmap rule a second time must not replace the vmap rule of
    # `__with_residuals`.
    made.op.register_vmap(lambda info, in_dims, x: rule(made.op, x))
    assert_close(vmap(grad(made.op))(X[0]), vmap(grad(plain))(X[0]))


def test_a_dimension_that_is_not_mapped_over_is_refused(namespace):
    made = LogSumExp(namespace)
    made.op.register_vmap(lambda info, in_dims, x: torchop.residuals((made.op(x), 0), 1, None))
    with pytest.raises(torchop.ResultError, match=r"lse__with_residuals: .* in a batch of size 3"):
        vmap(grad(made.op))(X[0])


def test_sequential_runs_the_kernel_for_each_element(namespace):
    made = LogSumExp(namespace)
    made.op.register_vmap("sequential")
    assert_close(vmap(grad(made.op))(X[0]), vmap(grad(plain))(X[0]))
    assert made.kernels == [(4,)] * 3
    made.op.register_vmap(made.rule)
    assert_close(vmap(grad(made.op))(X[0]), vmap(grad(plain))(X[0]))
    assert made.kernels[3:] == [(3, 4)]
    made.op.register_vmap("sequential")
    vmap(grad(made.op))(X[0])
    assert made.kernels[4:] == [(4,)] * 3


def wrong_none(op, x):
    return torchop.residuals((op(x), 0), None, None)


def wrong_dimension(op, x):
    return torchop.residuals((op(x), 0), 0, 0)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (wrong_none, r"returns None as .* 'softmax' of shape \[2, 4\]\. .* returns shape \[4\]"),
        (wrong_dimension, r"returns 0 as .* 'sizes' of shape \[2\]\. .* returns shape \[2\]"),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_wrong_dimension_of_a_residual_is_refused(namespace, rule, message, compiled):
    """Without this error, autograd would sum the gradient over the batch."""
    made = LogSumExp(namespace)
    made.op.register_vmap(lambda info, in_dims, x: rule(made.op, x))
    function = vmap(grad(made.op))
    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=rf"{made.name}: the vmap rule {message}") as why:
        function(X[0, :2])
    assert compiled or type(why.value) is torchop.ResultError
    assert vmap(made.op)(X[0, :2]).shape == (2,)


def test_none_for_a_residual_needs_a_fake_kernel(namespace):
    def cube(x: Tensor) -> Annotated[Tensor, torchop.Residuals(slope=Tensor)]:
        return torchop.residuals(x**3, 3 * x**2)

    op = torchop.custom_op(f"{namespace}::cube", cube, mutates_args=())
    op.register_autograd(backward_kernel=of_slope)
    op.register_vmap(lambda info, in_dims, x: torchop.residuals((op(x), 0), None))
    with pytest.raises(
        torchop.MissingFakeError, match=r"None as the batch dimension of the residual 'slope'"
    ):
        vmap(grad(op))(torch.tensor([1.0, 2.0]))
    op.register_vmap("sequential")
    assert vmap(grad(op))(torch.tensor([1.0, 2.0])).tolist() == [3, 12]
