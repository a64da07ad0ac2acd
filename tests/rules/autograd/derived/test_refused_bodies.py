"""Derived formulas reject bodies that compute outside of autograd."""

import contextlib
import functools
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests.rules.autograd.derived.support import derived, sine
from tests.rules.support import leaf_of
from torchop import GradientError

WAYS_OUT = (
    r"Write the body with operators .* register_autograd\('.*backward_kernel=.*torch.no_grad\(\)"
)


def through_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2)


def through_detached_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * 2)


def detached(x: Tensor) -> Tensor:
    return x.sin().detach() * 2


def without_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def through_data(x: Tensor) -> Tensor:
    return x.data.exp()


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (through_numpy, "numpy"),
        (through_detached_numpy, "left autograd in torch.Tensor.detach"),
        (detached, "left autograd in torch.Tensor.detach"),
        (without_grad, "left autograd in torch.Tensor.sin"),
        (through_data, "left autograd in torch.Tensor.data"),
    ],
)
def test_a_body_that_leaves_autograd_is_refused(namespace, body, problem):
    op = derived(f"{namespace}::f", body)
    x = leaf_of(0.5)
    with pytest.raises(GradientError, match=rf"{namespace}::f: .*{problem}.*{WAYS_OUT}"):
        op(x).sum().backward()
    assert x.grad is None
    with torch.no_grad():
        assert op(x).shape == (1,)


def test_an_operator_without_a_formula_in_the_body_is_refused(namespace):
    inner = None

    def body(x: Tensor) -> Tensor:
        return inner(x) * 2

    for library in (torchop, torch.library):
        inner = library.custom_op(f"{namespace}::{library.__name__[-3:]}", sine, mutates_args=())

        op = derived(f"{namespace}::f{library.__name__[-3:]}", body)
        with pytest.raises(GradientError, match="calls an operator without a formula"):
            op(leaf_of(0.5)).sum().backward()


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


def partly(x: Tensor, several: bool = True) -> tuple[Tensor, list[Tensor], Tensor]:
    return x * 2, [x.cos(), through_detached_numpy(x)], x.argmax()


def sum_of_two(op, x):
    first, (_, left), _ = op(x)
    return (first + left).sum()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("create_graph", [False, True])
def test_one_output_that_left_autograd_is_refused(namespace, native, create_graph):
    op = derived(f"{namespace}::f", partly)
    x = leaf_of(0.5, 1.5)
    op(x)  # the first call that records a gradient uses the dispatcher
    with contextlib.nullcontext() if native else torchop.native.disabled():
        total, others = sum_of_two(op, x), op(x)
    with pytest.raises(GradientError, match=r"output 2 depends on .* torch.Tensor.detach"):
        torch.autograd.grad(total, x, create_graph=create_graph)
    first, (second, _), index = others
    assert not index.requires_grad
    gradient = torch.autograd.grad((first + second).sum(), x)[0]
    assert_close(gradient, 2 - x.detach().sin())


def test_one_output_that_left_autograd_is_refused_in_a_structure(namespace):
    @torchop.custom_op(f"{namespace}::f", mutates_args=())
    def op(x: Pair) -> Pair:
        return Pair(x.first + x.second, through_detached_numpy(x.first))

    op.derive_autograd()
    x = Pair(leaf_of(0.5), leaf_of(1.5))
    result = op(x)
    with pytest.raises(GradientError, match="output 1 depends on the inputs, but the body"):
        (result.first + result.second).sum().backward()
    op(x).first.sum().backward()
    assert_close(x.first.grad, torch.ones_like(x.first))


@pytest.mark.parametrize("rule", ["sequential", "of the operator's own"])
def test_one_output_that_left_autograd_is_refused_in_vmap(namespace, rule):
    op = derived(f"{namespace}::f", partly)
    if rule == "sequential":
        op.register_vmap("sequential")
    else:
        op.register_vmap(lambda info, in_dims, x, several: (partly(x), (0, [0, 0], None)))
    gradients = torch.vmap(torch.func.grad(functools.partial(sum_of_two, op)))
    with pytest.raises(GradientError, match=r"output 2 depends on .* torch.Tensor.detach"):
        gradients(torch.rand(3, 2))
    first = torch.vmap(torch.func.grad(lambda x: op(x)[0].sum()))(torch.rand(3, 2))
    assert_close(first, torch.full((3, 2), 2.0))


def test_a_compiled_graph_may_return_an_output_without_gradients(namespace):
    op = derived(f"{namespace}::f", partly)
    op.register_fake(
        lambda x, several=True: (
            torch.empty_like(x),
            [torch.empty_like(x), torch.empty_like(x)],
            torch.empty((), dtype=torch.int64),
        )
    )
    x = leaf_of(0.5, 1.5)
    function = torch.compile(lambda x: op(x)[:2], fullgraph=True, backend="aot_eager")
    # In a compiled graph, the gradient of an unused output is a tensor of zeros instead of None. It
    # must not raise the error for a gradient that the body cannot propagate.
    first, _ = function(x)
    assert_close(torch.autograd.grad(first.sum(), x)[0], torch.full_like(x, 2))
    first, (_, left) = function(x)
    with pytest.raises(GradientError, match="output 2 depends on the inputs"):
        torch.autograd.grad((first + left).sum(), x)


def test_outputs_detached_on_purpose_are_accepted(namespace):
    def with_statistics(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.detach().mean()

    op = derived(f"{namespace}::f", with_statistics)
    x = leaf_of(0.5)
    op(x)[0].sum().backward()
    assert_close(x.grad, x.detach().exp())


def test_constant_chosen_by_a_detached_value_is_accepted(namespace):
    def body(x: Tensor) -> Tensor:
        return x * 2 if x.detach().abs().sum() > 1 else torch.zeros_like(x)

    op = derived(f"{namespace}::f", body)
    x = leaf_of(0.5)
    op(x).sum().backward()
    assert_close(x.grad, torch.zeros_like(x))


def test_an_error_of_the_body_is_passed_on(namespace):
    calls = []

    def body(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise KeyError("mine")
        return x.sin()

    op = derived(f"{namespace}::f", body)
    y = op(leaf_of(0.5))
    with pytest.raises(KeyError, match="mine"):
        y.backward()
