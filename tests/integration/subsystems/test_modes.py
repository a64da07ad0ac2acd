"""Modes, subclasses and tracers see each call exactly once, as a single operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing import assert_close
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.common import on_both
from tests.integration.compile.graphs import operators


@pytest.fixture
def mix(namespace: str) -> torchop.CustomOp:
    @torchop.custom_op(f"{namespace}::mix", mutates_args=())
    def mix(x: Tensor, y: Tensor, weight: float = 0.5) -> Tensor:
        return x * weight + y * (1 - weight)

    @mix.register_fake
    def _(x, y, weight=0.5):
        return torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        ctx.weight = inputs[2]

    @mix.register_autograd(setup_context=setup_context)
    def backward(ctx, grad):
        return grad * ctx.weight, grad * (1 - ctx.weight), None

    return mix


# --------------------------------------------------------------------------------------------------
# Fake tensors


def test_gradients_are_fake_under_a_fake_mode(mix):
    mode = FakeTensorMode()
    x = mode.from_tensor(torch.ones(2, requires_grad=True))
    with mode:
        (grad,) = torch.autograd.grad(mix(x, x, 0.25).sum(), x)
    assert isinstance(grad, FakeTensor)


def test_a_real_tensor_with_a_fake_tensor_is_rejected_as_for_any_operator(mix):
    real = torch.ones(2)
    mode = FakeTensorMode()
    fake = mode.from_tensor(real)
    with mode, pytest.raises(AssertionError, match="convert all Tensors to FakeTensors"):
        mix(fake, real)


# --------------------------------------------------------------------------------------------------
# make_fx


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_operator(mix, tracing_mode):
    def function(x: Tensor, y: Tensor) -> Tensor:
        return mix(x.sin(), y, weight=0.25) + 1

    x, y = torch.randn(2, 3), torch.randn(2, 3)
    graph = make_fx(function, tracing_mode=tracing_mode)(x, y)
    assert operators(graph) == [
        torch.ops.aten.sin.default,
        mix.overload,
        torch.ops.aten.add.Tensor,
    ]
    assert_close(graph(x, y), function(x, y))


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_the_formula_of_a_gradient(mix, tracing_mode):
    def gradient(x: Tensor) -> Tensor:
        return torch.autograd.grad(mix(x, x.detach(), 0.25).sum(), x)[0]

    x = torch.randn(3, requires_grad=True)
    graph = make_fx(gradient, tracing_mode=tracing_mode)(x)
    assert mix.overload in operators(graph)
    assert_close(graph(x), torch.full((3,), 0.25))


def test_symbolic_tracing_serves_other_sizes(mix):
    graph = make_fx(lambda x: mix(x, x * 2), tracing_mode="symbolic")(torch.ones(3))
    assert graph(torch.ones(7)).tolist() == [1.5] * 7


@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_a_mutation(namespace, tracing_mode):
    @torchop.custom_op(f"{namespace}::add_into", mutates_args={"out"})
    def add_into(x: Tensor, out: Tensor) -> None:
        out.add_(x)

    def function(x: Tensor) -> Tensor:
        out = torch.zeros(2)
        add_into(x, out)
        return out

    graph = make_fx(function, tracing_mode=tracing_mode)(torch.ones(2))
    assert add_into.overload in operators(graph)
    assert graph(torch.full((2,), 4.0)).tolist() == [4.0, 4.0]


# --------------------------------------------------------------------------------------------------
# Modes


class Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_dispatch_mode_sees_only_the_operator(mix, requires_grad):
    x = torch.ones(2, requires_grad=requires_grad)
    y = torch.zeros(2)
    with Watch() as watch:
        result = mix(x, y, weight=0.25)
    ((func, args, kwargs),) = watch.seen
    assert func is mix.overload
    assert args[0] is x or torch.equal(args[0], x)
    assert (len(args), args[2], kwargs) == (3, 0.25, {})
    assert result.requires_grad is requires_grad


def test_inner_dispatch_mode_sees_the_operator_first(mix):
    order = []

    class Named(TorchDispatchMode):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            order.append((self.name, func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Named("outer"), Named("inner"):
        mix(x, x)
    assert order == [("inner", mix.overload), ("outer", mix.overload)]


def test_a_function_mode_sees_the_overload(mix):
    seen = []

    class Record(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Record():
        assert mix(torch.ones(2), torch.zeros(2)).tolist() == [0.5, 0.5]
    assert seen.count(mix.overload) == 1


def test_device_context_affects_neither_arguments_nor_kernel(namespace):
    def scenario(library, namespace):
        @library.custom_op(f"{namespace}::plus_ones", mutates_args=())
        def plus_ones(x: Tensor) -> Tensor:
            return x + torch.ones(x.shape)

        x = torch.zeros(2)
        with torch.device("meta"):
            assert torch.ones(2).is_meta
            return plus_ones(x).tolist()

    assert on_both(scenario, namespace) == ([1.0, 1.0], [1.0, 1.0])


# --------------------------------------------------------------------------------------------------
# Tensor subclasses


class Tagged(torch.Tensor):
    """A subclass that overrides neither `__torch_function__` nor `__torch_dispatch__`."""


def test_torch_dispatch_of_a_subclass_handles_the_call(mix):
    x = TwoTensor(torch.zeros(2), torch.ones(2))
    result = mix(x, x + 1, 0.5)
    assert isinstance(result, TwoTensor)
    assert (result.a.tolist(), result.b.tolist()) == ([0.5, 0.5], [1.5, 1.5])


def test_a_gradient_flows_through_a_subclass(mix):
    x = TwoTensor(torch.zeros(2), torch.ones(2)).requires_grad_()
    (mix(x, x.detach(), 0.25) * x.detach()).sum().backward()
    assert isinstance(x.grad, TwoTensor)
    assert (x.grad.a.tolist(), x.grad.b.tolist()) == ([0.0, 0.0], [0.25, 0.25])


@pytest.mark.parametrize("compiled", [False, True])
def test_a_subclass_is_compiled_with_a_rule_and_without(mix, compiled):
    backend = torch.compile(backend="aot_eager", fullgraph=True) if compiled else lambda f: f
    function = backend(lambda x: mix(x, x * 2, 0.5) + 1)
    result = function(TwoTensor(torch.zeros(2), torch.ones(2)))
    assert isinstance(result, TwoTensor)
    assert (result.a.tolist(), result.b.tolist()) == ([1.0, 1.0], [2.5, 2.5])

    @mix.register_torch_dispatch(TwoTensor)
    def _(cls, func, types, args, kwargs):
        return TwoTensor(func(args[0].a, args[1].a) + 10, func(args[0].b, args[1].b) + 20)

    torch._dynamo.reset()
    result = function(TwoTensor(torch.zeros(2), torch.ones(2)))
    assert (result.a.tolist(), result.b.tolist()) == ([11.0, 11.0], [22.5, 22.5])


def test_subclass_without_handlers_is_preserved(mix):
    x = torch.ones(2).as_subclass(Tagged)
    assert type(mix(x, x)) is type(x + x) is Tagged


# --------------------------------------------------------------------------------------------------
# Counting and profiling


@pytest.mark.parametrize("requires_grad", [False, True])
def test_the_profiler_shows_the_name_of_the_operator(mix, namespace, requires_grad):
    x = torch.ones(2, requires_grad=requires_grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        mix(x, torch.ones(2))
    names = [event.name for event in profile.events()]
    assert names.count(f"{namespace}::mix") == 1
    assert names.count("aten::mul") == 2


# --------------------------------------------------------------------------------------------------
# TorchScript


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_jit_trace_records_the_operator(mix, namespace):
    def function(x: Tensor) -> Tensor:
        return mix(x, x * 2, 0.25) + 1

    x = torch.randn(3)
    traced = torch.jit.trace(function, (x,))
    assert [node.kind() for node in traced.graph.nodes()].count(f"{namespace}::mix") == 1
    y = torch.randn(5)
    assert_close(traced(y), function(y))
