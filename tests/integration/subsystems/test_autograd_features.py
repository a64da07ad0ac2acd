"""Autograd features such as double backward, checkpoints and compiled autograd."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchop
from tests.integration.compile.graphs import AotRecorder


class Cube:
    """An operator that computes x ** 3 and counts how often its kernel runs."""

    def __init__(self, namespace: str) -> None:
        self.forwards = 0

        @torchop.custom_op(f"{namespace}::cube", mutates_args=())
        def cube(x: Tensor) -> Tensor:
            self.forwards += 1
            return x**3

        @cube.register_fake
        def _(x):
            return torch.empty_like(x)

        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @cube.register_autograd(setup_context=setup_context)
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            return 3 * grad * x.square()

        self.op = cube

    def __call__(self, x: Tensor) -> Tensor:
        return self.op(x)


@pytest.fixture
def cube(namespace: str) -> Cube:
    return Cube(namespace)


def _input(value: float) -> Tensor:
    return torch.tensor([value], requires_grad=True)


# --------------------------------------------------------------------------------------------------
# Checkpointing


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_runs_the_kernel_again_for_the_same_gradient(cube, use_reentrant):
    x = _input(2.0)
    result = checkpoint(lambda x: cube(x).sin(), x, use_reentrant=use_reentrant)
    assert cube.forwards == 1
    result.sum().backward()
    assert cube.forwards == 2
    assert_close(x.grad, 12 * torch.cos(torch.tensor([8.0])))


@pytest.mark.parametrize(
    ("policy", "forwards"),
    [(CheckpointPolicy.MUST_SAVE, 1), (CheckpointPolicy.MUST_RECOMPUTE, 2)],
)
def test_a_policy_decides_whether_a_checkpoint_runs_the_kernel_again(cube, policy, forwards):
    met = []

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is cube.op.overload:
            met.append(op)
            return policy
        return CheckpointPolicy.PREFER_RECOMPUTE

    x = _input(2.0)
    result = checkpoint(
        lambda x: cube(x).sin(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(decide),
    )
    result.sum().backward()
    assert met
    assert cube.forwards == forwards
    assert_close(x.grad, 12 * torch.cos(torch.tensor([8.0])))


def test_a_formula_may_read_its_saved_tensors_twice_under_selective_checkpointing(cube):
    def backward(ctx, grad):
        return 3 * grad * ctx.saved_tensors[0] * ctx.saved_tensors[0]

    cube.op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    x = _input(2.0)
    checkpoint(
        lambda x: cube(x * 1).sum(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts([torch.ops.aten.mul.Tensor]),
    ).backward()
    assert x.grad.item() == 12.0


@pytest.mark.parametrize(
    ("policy", "recomputed"),
    [(CheckpointPolicy.MUST_SAVE, False), (CheckpointPolicy.MUST_RECOMPUTE, True)],
)
def test_policy_decides_recomputation_in_a_compiled_backward(cube, policy, recomputed):
    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return policy if op is cube.op.overload else CheckpointPolicy.PREFER_RECOMPUTE

    recorder = AotRecorder()
    contexts = functools.partial(create_selective_checkpoint_contexts, decide)

    @torch.compile(backend=recorder, fullgraph=True)
    def function(x: Tensor) -> Tensor:
        return checkpoint(lambda x: cube.op(x).sin(), x, use_reentrant=False, context_fn=contexts)

    x = _input(2.0)
    function(x).sum().backward()
    assert_close(x.grad, 12 * torch.cos(torch.tensor([8.0])))
    (graph,) = recorder.backward
    assert ("cube.default" in graph.code) is recomputed


# --------------------------------------------------------------------------------------------------
# Compiled autograd


@pytest.mark.parametrize("forward", ["eager", "compiled"])
def test_compiled_autograd_captures_the_formula(cube, forward):
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    def loss(x: Tensor) -> Tensor:
        return (cube.op(x) * 2).sum()

    function = loss if forward == "eager" else torch.compile(loss, backend="aot_eager")
    for value, expected in ((2.0, 24.0), (1.0, 6.0)):
        x = _input(value)
        result = function(x)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            result.backward()
        assert x.grad.item() == expected
    # Only the formula calls `square`, which AOT Autograd may turn into `pow`. So one of them in a
    # graph shows that compiled autograd captured the formula.
    assert any("square" in graph or "pow" in graph for graph in graphs)


# --------------------------------------------------------------------------------------------------
# Without gradients


def test_an_output_of_inference_mode_is_an_inference_tensor(cube):
    x = _input(2.0)
    with torch.inference_mode():
        assert cube(x).is_inference()
        assert cube(torch.ones(1)).is_inference()
    assert not cube(x).is_inference()


def test_inference_tensor_is_accepted_without_grad(cube):
    with torch.inference_mode():
        x = torch.tensor([2.0])
    assert cube(x).item() == 8.0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_a_mutation_works_in_every_gradient_mode(namespace, mode):
    @torchop.custom_op(f"{namespace}::fill", mutates_args={"x"})
    def fill(x: Tensor, value: float) -> None:
        x.fill_(value)

    with mode():
        x = torch.zeros(2)
        fill(x, 3.0)
    assert x.tolist() == [3.0, 3.0]
