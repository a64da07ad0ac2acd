"""Gradients of calls on DTensors, whose placements follow from the operator's sharding rule.

Uses private names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from tests.rules.user.sharding.ranks import gathered, on_mesh, words
from torchop._rules.residuals import residual_count

X = torch.arange(32.0).reshape(4, 8).cos()
W = torch.arange(8.0).sin()
Definer = Callable[[str], Any]


def layer(x: Tensor, w: Tensor) -> Tensor:
    return (x * w).sin().softmax(-1)


def derived(namespace: str) -> Any:
    op = torchop.custom_op(f"{namespace}::op", layer, mutates_args=())
    op.register_fake(lambda x, w: torch.empty_like(x))
    op.derive_autograd()
    return op


def save_inputs(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def in_numpy(x: Any, w: Any, grad: Any) -> tuple[Any, Any]:
    product = x * w
    exponential = np.exp(np.sin(product))
    output = exponential / exponential.sum(-1, keepdims=True)
    inner = output * (grad - (grad * output).sum(-1, keepdims=True)) * np.cos(product)
    return inner * w, (inner * x).sum(0)


def traced_formula(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    product = x * w
    output = product.sin().softmax(-1)
    inner = output * (grad - (grad * output).sum(-1, keepdim=True)) * product.cos()
    return inner * w, (inner * x).sum(0)


def with_formula(formula: Any, **options: Any) -> Definer:
    def define(namespace: str) -> Any:
        op = torchop.custom_op(f"{namespace}::op", layer, mutates_args=())
        op.register_fake(lambda x, w: torch.empty_like(x))
        op.register_autograd(formula, setup_context=save_inputs, **options)
        return op

    return define


def with_residuals(formula: Any, *, has_own_rule: bool = False) -> Definer:
    def define(namespace: str) -> Any:
        residuals = {"product": Tensor}
        op = torchop.custom_op(
            f"{namespace}::op", layer_with_product, mutates_args=(), residuals=residuals
        )
        op.register_fake(lambda x, w: torchop.residuals(torch.empty_like(x), torch.empty_like(x)))

        def setup_context(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
            ctx.save_for_backward(*inputs)
            assert type(residuals.product) is type(inputs[0])

        op.register_autograd(formula, setup_context=setup_context)
        if has_own_rule:
            torchop.register_sharding(
                f"{namespace}::op__with_residuals", "... d, d -> ... d, ... d", whole="d"
            )
        return op

    return define


def with_backward_kernel(namespace: str) -> Any:
    op = torchop.custom_op(f"{namespace}::op", layer, mutates_args=())
    op.register_fake(lambda x, w: torch.empty_like(x))
    op.register_autograd(backward_kernel=backward_kernel)
    return op


def backward_kernel(grad: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    assert type(x) is type(w) is type(grad) is Tensor
    seen_shapes.append(tuple(x.shape))
    gradients = in_numpy(x.numpy(), w.numpy(), grad.numpy())
    return torch.from_numpy(gradients[0]), torch.from_numpy(gradients[1])


seen_shapes: list[tuple[int, ...]] = []


def with_everything(namespace: str) -> Any:
    residuals = {"product": Tensor}
    op = torchop.custom_op(
        f"{namespace}::op", layer_with_product, mutates_args=(), residuals=residuals
    )
    op.register_fake(lambda x, w: torchop.residuals(torch.empty_like(x), torch.empty_like(x)))

    def kernel(
        grad: Tensor, product: Tensor, output: Tensor, w: Tensor, x: Tensor
    ) -> tuple[Tensor, Tensor]:
        torch.testing.assert_close(product, x * w)
        torch.testing.assert_close(output, layer(x, w))
        return backward_kernel(grad, x, w)

    op.register_autograd(backward_kernel=kernel)
    return op


def layer_with_product(x: Tensor, w: Tensor) -> Tensor:
    return torchop.residuals(layer(x, w), x * w)


DEFINERS: dict[str, Definer] = {
    "a backward kernel": with_backward_kernel,
    "a backward kernel of everything": with_everything,
    "residuals": with_residuals(traced_formula),
    "residuals with a rule": with_residuals(traced_formula, has_own_rule=True),
    "formula": with_formula(traced_formula),
    "derived": derived,
}
PLACED = ("S0 R", "S1 S0", "R R", "S0 S0", "P R")


def expected() -> tuple[Tensor, Tensor, Tensor]:
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    y = layer(x, w)
    (y * X.exp()).sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    return y.detach(), x.grad, w.grad


def gradients(mesh: Any, function: Any, placed: str) -> Iterator[Any]:
    x, w = (on_mesh(mesh, t, p) for t, p in zip((X, W), placed.split(), strict=True))
    x.requires_grad_()
    w.requires_grad_()
    y = function(x, w)
    (y * on_mesh(mesh, X.exp())).sum().backward()
    yield from (y.detach(), x.grad, w.grad)


@pytest.mark.parametrize("placed", PLACED)
@pytest.mark.parametrize("kind", DEFINERS)
def test_gradients_equal_those_of_one_device(
    namespace: str, mesh: Any, kind: str, placed: str
) -> None:
    op = DEFINERS[kind](namespace)
    operand = "; ... d" if residual_count(op) and kind != "residuals with a rule" else ""
    op.register_sharding(f"... d, d -> ... d{operand}", whole="d")
    for value, right in zip(gradients(mesh, op, placed), expected(), strict=True):
        torch.testing.assert_close(gathered(value), right)


@pytest.mark.parametrize(
    ("define", "residuals"), [(with_backward_kernel, ""), (with_everything, "; [... d]")]
)
def test_a_backward_kernel_runs_on_the_shards_of_its_forward(
    namespace: str, mesh: Any, define: Definer, residuals: str
) -> None:
    op = define(namespace)
    op.register_sharding(f"... d, d -> ... d{residuals}", whole="d")
    seen_shapes.clear()
    found = list(gradients(mesh, op, "S0 R"))
    assert set(seen_shapes) == {(len(X) // mesh.size(), 8)}
    assert [words(found[1]), words(found[2])] == ["S0", "P"]


def squares(namespace: str, rule: Any, **options: Any) -> Any:
    """Define an operator that squares, and returns 2 * x as a residual.

    Its formula appends the placement of the residual to `placed`.
    """

    def square(x: Tensor) -> Tensor:
        return torchop.residuals(x * x, 2 * x)

    def setup_context(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
        ctx.save_for_backward(residuals.slope)

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        placed.append(words(ctx.saved_tensors[0]))
        return grad * ctx.saved_tensors[0]

    residuals = {"slope": Tensor}
    op = torchop.custom_op(f"{namespace}::op", square, mutates_args=(), residuals=residuals)
    op.register_fake(lambda x: torchop.residuals(torch.empty_like(x), torch.empty_like(x)))
    op.register_autograd(backward, setup_context=setup_context)
    op.register_sharding(rule, **options)
    return op


placed: list[str] = []


@pytest.mark.parametrize(
    ("rule", "x", "slope"),
    [
        ("pointwise", "S1", "S1"),
        ("batch", "S0", "S0"),
        ("batch", "S1", "R"),
        ("replicate", "S0", "R"),
        ("a b -> a b; a b", "S1", "S1"),
        ("a b -> a b; a .", "S0", "S0"),
        ("a b -> a b; a .", "S1", "R"),
        ("a b -> a b; [a b]", "S1", "S1"),
        (torchop.sharding("a b -> a b; a b", whole="b"), "S1", "R"),
        (lambda x: "a b -> a b; a b", "S1", "S1"),
    ],
)
def test_residuals_have_the_rules_placements(
    namespace: str, mesh: Any, rule: Any, x: str, slope: str
) -> None:
    op = squares(namespace, rule)
    value = on_mesh(mesh, X, x).requires_grad_()
    placed.clear()
    op(value).sum().backward()
    assert placed == [slope]
    torch.testing.assert_close(gathered(value.grad), 2 * X)


def test_pending_sum_of_the_result_does_not_apply_to_residuals(namespace: str, mesh: Any) -> None:
    """The result is linear in x, so it may be a pending sum of the ranks' results.

    The residual is not linear in x, so it must not be a pending sum.
    """

    def total(x: Tensor) -> Tensor:
        return torchop.residuals(x.sum(-1), x.cos().amax(-1))

    seen: list[str] = []

    def setup_context(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
        seen.append(words(residuals.most))
        torch.testing.assert_close(gathered(residuals.most), X.cos().amax(-1))
        ctx.save_for_backward(*inputs, residuals.most)

    residuals = {"most": Tensor}
    op = torchop.custom_op(f"{namespace}::op", total, mutates_args=(), residuals=residuals)
    op.register_fake(lambda x: torchop.residuals(x.new_empty(len(x)), x.new_empty(len(x))))
    op.register_autograd(
        lambda ctx, grad: grad.unsqueeze(-1).expand(ctx.saved_tensors[0].shape),
        setup_context=setup_context,
    )
    op.register_sharding("a b -> a; a", reduce={"b": "sum"}, linear=(0,))
    for words_of_x, words_of_result in (("S1", "P"), ("P", "P")):
        with torch.no_grad():
            assert words(op(on_mesh(mesh, X, words_of_x))) == words_of_result
        value = on_mesh(mesh, X, words_of_x).requires_grad_()
        op(value).sum().backward()
        torch.testing.assert_close(gathered(value.grad), torch.ones_like(X))
    assert set(seen) <= {"R", "S0"}


def test_a_rule_function_that_ignores_residuals_is_called(namespace: str, mesh: Any) -> None:
    op = squares(namespace, "a b -> a b")
    value = on_mesh(mesh, X, "S0")
    torch.testing.assert_close(gathered(op(value)), X * X)
    message = (
        rf"^{namespace}::op: a call that records a gradient saves 1 residual, and the sharding "
        rf"rule 'a b -> a b' does not say .* after a semicolon, .* '{namespace}::op__with_resid"
    )
    with pytest.raises(torchop.ShardingError, match=message):
        op(value.requires_grad_())
    torchop.register_sharding(f"{namespace}::op__with_residuals", "replicate")
    op(value).sum().backward()
    torch.testing.assert_close(gathered(value.grad), 2 * X)


@pytest.mark.parametrize(
    ("rule", "got"),
    [
        ("a b -> a b; a b, a b", "has 2 operands after ';', but the operator declares 1 residual"),
        ("a b -> a b; c", "only a result has the dimension 'c'"),
        ("a b -> a b, a b", r"the operator returns 1 tensor \(and residuals, after ';'\)\."),
    ],
)
def test_wrong_operands_of_residuals(namespace: str, rule: str, got: str) -> None:
    with pytest.raises(torchop.ShardingRuleError, match=got):
        squares(namespace, rule)


def test_operands_of_residuals_that_are_not_there(namespace: str) -> None:
    op = with_backward_kernel(namespace)
    with pytest.raises(torchop.ShardingRuleError, match="declares 0 residuals"):
        op.register_sharding("... d, d -> ... d; d", whole="d")


def test_a_backward_kernel_without_operands_of_the_forward_gets_whole_tensors(
    namespace: str, mesh: Any
) -> None:
    def scaled(x: Tensor, by: float) -> Tensor:
        return x * by * x

    def kernel(grad: Tensor, x: Tensor) -> Tensor:
        assert x.shape == X.shape
        return grad * x * 6

    op = torchop.custom_op(f"{namespace}::op", scaled, mutates_args=())
    op.register_fake(lambda x, by: torch.empty_like(x))
    op.register_autograd(backward_kernel=kernel)
    op.register_sharding("pointwise")
    x = on_mesh(mesh, X, "S0").requires_grad_()
    op(x, 3.0).sum().backward()
    torch.testing.assert_close(gathered(x.grad), X * 6)


def test_a_backward_kernel_with_lists(namespace: str, mesh: Any) -> None:
    def total(xs: list[Tensor]) -> Tensor:
        return torch.stack(xs).square().sum(0)

    def kernel(grad: Tensor, xs: list[Tensor]) -> list[Tensor]:
        assert [x.shape for x in xs] == [(2, 8), (2, 8)]
        return [2 * x * grad for x in xs]

    op = torchop.custom_op(f"{namespace}::op", total, mutates_args=())
    op.register_fake(lambda xs: torch.empty_like(xs[0]))
    op.register_autograd(backward_kernel=kernel)
    op.register_sharding("[b n] -> b n", whole="n")
    xs = [on_mesh(mesh, each, "S0").requires_grad_() for each in (X, X.exp())]
    op(xs).sum().backward()
    for value, right in zip(xs, (2 * X, 2 * X.exp()), strict=True):
        assert words(value.grad) == "S0"
        torch.testing.assert_close(gathered(value.grad), right)


def test_without_a_rule_errors_of_helper_operators_name_the_operator(
    namespace: str, mesh: Any
) -> None:
    derived(namespace)
    x = on_mesh(mesh, X, "S0").requires_grad_()
    with pytest.raises(torchop.MissingRuleError, match=f"^{namespace}::op has no sharding rule"):
        getattr(torch.ops, namespace).op__training(x, on_mesh(mesh, W))


def test_reductions_that_cannot_be_transposed_are_gathered(namespace: str, mesh: Any) -> None:
    def kernel(grad: Tensor, x: Tensor) -> Tensor:
        largest = x.numpy() == x.numpy().max(-1, keepdims=True)
        return torch.from_numpy(largest * grad.unsqueeze(-1).numpy())

    op = torchop.custom_op(
        f"{namespace}::op", lambda x: x.amax(-1), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    op.register_fake(lambda x: x.new_empty(x.shape[:-1]))
    op.register_autograd(backward_kernel=kernel)
    op.register_sharding("... d -> ...", reduce={"d": "max"})
    assert words(op(on_mesh(mesh, X, "S1"))) == "Partial(max)"
    x = on_mesh(mesh, X, "S1").requires_grad_()
    y = op(x)
    y.sum().backward()
    right = X.clone().requires_grad_()
    right.amax(-1).sum().backward()
    torch.testing.assert_close(gathered(y.detach()), X.amax(-1))
    torch.testing.assert_close(gathered(x.grad), right.grad)
