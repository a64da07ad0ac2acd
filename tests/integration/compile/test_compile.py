from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import on_both
from tests.integration.compile.cases import CASES, _like_first, _scaled, define, define_cube
from tests.integration.compile.graphs import BACKENDS, AotRecorder, Recorder, operators


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_one_graph_contains_the_operator_and_equals_eager(namespace, name, backend):
    case = CASES[name]
    op = define(namespace, case)
    recorder = Recorder(backend)

    def function(x: Tensor) -> Tensor:
        return case.call(op, x.sin()) + 1

    compiled = torch.compile(function, backend=recorder, fullgraph=True)
    x = torch.randn(4, 3)
    assert_close(compiled(x), function(x))
    assert op.overload in recorder.targets

    # A call with different data of the same shape must not recompile.
    x = torch.randn(4, 3)
    assert_close(compiled(x), function(x))
    assert len(recorder.graphs) == 1


# --------------------------------------------------------------------------------------------------
# Training


def _differentiable(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::product", mutates_args=())
    def product(xs: list[Tensor], scale: float = 2.0) -> tuple[Tensor, Tensor]:
        return xs[0] * xs[1] * scale, xs[0] + xs[1]

    @product.register_fake
    def _(xs, scale=2.0):
        return torch.empty_like(xs[0]), torch.empty_like(xs[0])

    def setup_context(ctx, inputs, output):
        xs, ctx.scale = inputs
        ctx.save_for_backward(*xs)

    @product.register_autograd(setup_context=setup_context)
    def backward(ctx, grad_product, grad_sum):
        first, second = ctx.saved_tensors
        return [
            grad_product * second * ctx.scale + grad_sum,
            grad_product * first * ctx.scale + grad_sum,
        ], None

    return product


@pytest.mark.parametrize("backend", BACKENDS)
def test_training_gives_the_gradients_of_eager_mode(namespace, backend):
    product = _differentiable(namespace)
    recorder = Recorder(backend)

    def loss(a: Tensor, b: Tensor) -> Tensor:
        first, second = product([a.sin(), b])
        return (first * second.cos()).sum()

    compiled = torch.compile(loss, backend=recorder, fullgraph=True)
    inputs = [torch.randn(5, requires_grad=True) for _ in range(2)]
    expected = torch.autograd.grad(loss(*inputs), inputs)
    for _ in range(2):
        assert_close(torch.autograd.grad(compiled(*inputs), inputs), expected)
    assert len(recorder.graphs) == 1


# --------------------------------------------------------------------------------------------------
# Ways to call


class _Module(torch.nn.Module):
    def __init__(self, op: Any) -> None:
        super().__init__()
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, 1.0)


class _Holder:
    def __init__(self, op: Any) -> None:
        self.op = op


def _closure(op: Any) -> Callable[[Tensor], Tensor]:
    holder = _Holder(op)
    return lambda x: holder.op(x, shift=1.0)


WAYS = {
    "the handle itself": lambda op: op,
    "a closure": _closure,
    "an item of a list": lambda op: lambda x, which=1: [None, op][which](x, 1.0),
    "a partial": lambda op: functools.partial(op, shift=1.0),
    "a partial inside a function": lambda op: lambda x: functools.partial(op, shift=1.0)(x),
    "the method __call__": lambda op: lambda x: op.__call__(x, 1.0),
    "a module": _Module,
    "the overload": lambda op: lambda x: op.overload(x, 1.0),
    "the packet of torch.ops": lambda op: lambda x: op.overload.overloadpacket(x, 1.0),
    "getattr on torch.ops": lambda op: (
        lambda x: getattr(torch.ops, op.overload.namespace).cube.default(x, 1.0)
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_call_puts_the_overload_into_one_graph(namespace, way):
    cube = define_cube(namespace)
    call = WAYS[way](cube)
    recorder = AotRecorder()
    compiled = torch.compile(call, backend=recorder, fullgraph=True)
    for _ in range(2):
        x = torch.randn(3)
        assert_close(compiled(x), call(x))
    (graph,) = recorder.forward
    assert operators(graph) == [cube.overload]


def test_dynamo_traces_nothing_between_a_call_and_its_overload(namespace, traced):
    def scenario(library, namespace):
        op = library.custom_op(f"{namespace}::op", _scaled, mutates_args=())
        op.register_fake(_like_first)
        traced.clear()
        torch.compile(lambda x: op(op(x)), backend="eager", fullgraph=True)(torch.ones(2))
        return list(traced)

    ours, stock = on_both(scenario, namespace)
    assert ours == []
    assert stock == ["__call__"] * 2


def test_redefining_an_operator_recompiles_the_graph(namespace):
    cube = define_cube(namespace)
    holder = _Holder(cube)
    recorder = Recorder()
    compiled = torch.compile(lambda x: holder.op(x), backend=recorder)
    compiled(torch.ones(2))
    holder.op = define_cube(f"{namespace}_other")
    compiled(torch.ones(2))
    compiled(torch.ones(2))
    assert recorder.targets == [cube.overload, holder.op.overload]
    define_cube(f"{namespace}_other")
    with pytest.raises(torchop.OperatorGoneError):
        compiled(torch.ones(2))
