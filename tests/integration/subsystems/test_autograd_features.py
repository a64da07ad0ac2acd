"""What autograd offers beyond a backward pass: it works with operators as with PyTorch's own."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchop
from tests._support.common import in_threads
from tests.integration.compile.graphs import AotRecorder


class Cube:
    """An operator that computes x ** 3, with all that happens in it written down."""

    def __init__(self, namespace: str) -> None:
        self.forwards = 0
        self.contexts = 0

        @torchop.custom_op(f"{namespace}::cube", mutates_args=())
        def cube(x: Tensor) -> Tensor:
            self.forwards += 1
            return x**3

        @cube.register_fake
        def _(x):
            return torch.empty_like(x)

        def setup_context(ctx, inputs, output):
            self.contexts += 1
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


def _input(*values: float, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(values or (2.0,), requires_grad=True, dtype=dtype)


# --------------------------------------------------------------------------------------------------
# Differentiating twice


def test_the_second_and_third_derivatives_follow_from_the_formula(cube):
    x = _input(2.0)
    (first,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    assert [first.item(), second.item(), third.item()] == [12.0, 12.0, 6.0]


def test_gradcheck_and_gradgradcheck_pass(cube):
    x = _input(0.5, -1.5, dtype=torch.float64)
    assert torch.autograd.gradcheck(cube, x)
    assert torch.autograd.gradgradcheck(cube, x)


def test_gradcheck_fails_for_a_wrong_formula(cube):
    cube.op.register_autograd(lambda ctx, grad: grad)
    with pytest.raises(RuntimeError, match="Jacobian mismatch"):
        torch.autograd.gradcheck(cube, _input(0.5, dtype=torch.float64))


def test_a_formula_made_of_operators_is_differentiated_through_them(namespace):
    # The gradient of cube is an operator too, and so is the gradient of that.
    library = {}

    def operator(name: str, kernel: Any, gradient: Any) -> None:
        op = torchop.custom_op(
            f"{namespace}::{name}", kernel, mutates_args=(), schema="(Tensor x) -> Tensor"
        )
        op.register_autograd(
            lambda ctx, grad: grad * gradient(ctx.saved_tensors[0]),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
        )
        library[name] = op

    operator("six_x", lambda x: 6 * x, lambda x: torch.full_like(x, 6.0))
    operator("three_x_squared", lambda x: 3 * x * x, lambda x: library["six_x"](x))
    operator("x_cubed", lambda x: x**3, lambda x: library["three_x_squared"](x))
    x = _input(2.0)
    (first,) = torch.autograd.grad(library["x_cubed"](x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
    (third,) = torch.autograd.grad(second.sum(), x)
    assert [first.item(), second.item(), third.item()] == [12.0, 12.0, 6.0]


# --------------------------------------------------------------------------------------------------
# The graph is used up, or kept


def test_a_second_backward_is_refused_in_pytorchs_words(cube):
    y = cube(_input(2.0)).sum()
    y.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.backward()


def test_a_graph_that_is_retained_gives_the_same_gradient_again(cube):
    x = _input(2.0)
    y = cube(x).sum()
    for _ in range(3):
        (grad,) = torch.autograd.grad(y, x, retain_graph=True)
        assert grad.item() == 12.0


def test_changing_a_saved_input_in_place_is_noticed(cube):
    x = _input(2.0)
    y = x * 1
    result = cube(y).sum()
    y.mul_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_an_operator_that_writes_into_a_saved_input_is_noticed(cube, namespace):
    @torchop.custom_op(f"{namespace}::wipe", mutates_args={"x"})
    def wipe(x: Tensor) -> None:
        x.detach().numpy()[...] = 0

    x = _input(2.0)
    y = (x * 1).detach().requires_grad_()
    result = cube(y).sum()
    with torch.no_grad():
        wipe(y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


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


def test_a_list_of_operators_is_a_policy(cube):
    x = _input(2.0)
    result = checkpoint(
        lambda x: cube(x).sin(),
        x,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts([cube.op.overload]),
    )
    result.sum().backward()
    assert cube.forwards == 1


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
def test_a_policy_decides_what_a_compiled_backward_recomputes(cube, policy, recomputed):
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
# Hooks


def test_hooks_on_saved_tensors_see_what_the_formula_saved(cube):
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor.double()

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(tensor)
        return tensor.float()

    x = _input(2.0)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = cube(x)
    result.sum().backward()
    assert [tensor.item() for tensor in packed] == [2.0]
    assert [tensor.dtype for tensor in unpacked] == [torch.float64]
    assert x.grad.item() == 12.0


def test_saved_tensors_can_wait_on_the_cpu(cube):
    x = _input(2.0)
    with torch.autograd.graph.save_on_cpu():
        result = cube(x)
    result.sum().backward()
    assert x.grad.item() == 12.0


def test_hooks_on_tensors_and_nodes_run_around_the_formula(cube):
    seen = []
    x = _input(2.0)
    x.register_hook(lambda grad: seen.append(("input", grad.item())))
    y = cube(x)
    y.register_hook(lambda grad: grad * 10)
    y.grad_fn.register_prehook(lambda grads: seen.append(("before", grads[0].item())))
    y.grad_fn.register_hook(lambda into, out: seen.append(("after", into[0].item())))
    y.sum().backward()
    assert seen == [("before", 10.0), ("after", 120.0), ("input", 120.0)]
    assert x.grad.item() == 120.0


def test_the_node_in_the_graph_bears_the_name_of_the_operator(cube, namespace):
    result = cube(_input())  # until 2.12, its node goes with it
    assert result.grad_fn.name() == f"{namespace}_cubeBackward"


# --------------------------------------------------------------------------------------------------
# Anomaly mode


def test_anomaly_mode_points_at_the_call_whose_gradient_is_nan(cube, recwarn):
    cube.op.register_autograd(lambda ctx, grad: grad * float("nan"))
    with torch.autograd.detect_anomaly(check_nan=True):
        result = cube(_input(2.0)).sum()
        with pytest.raises(RuntimeError, match="returned nan values in its 0th output"):
            result.backward()
    told = "".join(str(warning.message) for warning in recwarn)
    assert "in test_anomaly_mode_points_at_the_call_whose_gradient_is_nan" in told
    assert "result = cube(_input(2.0)).sum()" in told


def test_anomaly_mode_says_nothing_of_a_right_formula(cube):
    x = _input(2.0)
    with torch.autograd.set_detect_anomaly(True):
        cube(x).sum().backward()
    assert x.grad.item() == 12.0


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
    # Only the formula squares anything; AOTAutograd writes it as a power.
    assert any("square" in graph or "pow" in graph for graph in graphs)


# --------------------------------------------------------------------------------------------------
# Threads


def test_backward_runs_in_many_threads_at_once(cube):
    formula, threads_met = cube.op._backward_fn, set()

    def backward(ctx, grad):
        threads_met.add(threading.get_ident())
        return formula(ctx, grad)

    cube.op.register_autograd(backward, setup_context=cube.op._setup_context_fn)
    grads: dict[int, float] = {}
    barrier = threading.Barrier(8)

    def train(number: int) -> None:
        x = _input(float(number))
        result = cube(x).sum()
        barrier.wait()
        for _ in range(20):
            (grad,) = torch.autograd.grad(result, x, retain_graph=True)
        grads[number] = grad.item()

    in_threads(train)
    assert grads == {number: 3.0 * number**2 for number in range(8)}
    assert len(threads_met) == 8


def test_one_graph_is_differentiated_from_many_threads(cube):
    x = _input(2.0)
    result = cube(x).sum()
    in_threads(lambda _: result.backward(retain_graph=True))
    assert x.grad.item() == 8 * 12.0


# --------------------------------------------------------------------------------------------------
# Where nothing is recorded


def _no_input_that_requires_grad(x: Tensor) -> Any:
    x.requires_grad_(False)
    return torch.enable_grad()


OFF = {
    "no_grad": lambda x: torch.no_grad(),
    "inference_mode": lambda x: torch.inference_mode(),
    "no input requires grad": _no_input_that_requires_grad,
}


@pytest.mark.parametrize("off", OFF)
def test_where_nothing_is_recorded_setup_context_does_not_run(cube, off):
    x = _input(2.0)
    with OFF[off](x):
        result = cube(x)
    assert result.item() == 8.0
    assert not result.requires_grad
    assert result.grad_fn is None
    assert cube.contexts == 0
    assert cube(_input(2.0)).requires_grad
    assert cube.contexts == 1


def test_an_output_of_inference_mode_is_an_inference_tensor(cube):
    x = _input(2.0)
    with torch.inference_mode():
        assert cube(x).is_inference()
        assert cube(torch.ones(1)).is_inference()
    assert not cube(x).is_inference()


def test_an_inference_tensor_passes_where_nothing_requires_grad(cube):
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


def test_the_kernel_runs_with_gradients_off_while_its_call_is_recorded(namespace):
    modes = []

    @torchop.custom_op(f"{namespace}::look", mutates_args=())
    def look(x: Tensor) -> Tensor:
        modes.append((torch.is_grad_enabled(), (x * 2).requires_grad))
        return x.clone()

    look.register_autograd(lambda ctx, grad: grad)
    result = look(_input(1.0))
    assert modes == [(False, False)]
    assert result.requires_grad


def test_a_dual_tensor_is_refused_not_given_a_zero_tangent(cube):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.tensor([2.0]), torch.tensor([1.0]))
        with pytest.raises(torchop.ForwardModeError, match="forward-mode"):
            cube(x)


def test_grad_vjp_jacrev_and_hessian_of_torch_func_use_the_formula(cube):
    x = torch.tensor(2.0)
    assert torch.func.grad(cube)(x).item() == 12.0
    assert torch.func.vjp(cube, x)[1](torch.tensor(10.0))[0].item() == 120.0
    assert torch.func.jacrev(cube)(torch.tensor([1.0, 2.0])).tolist() == [[3.0, 0.0], [0.0, 12.0]]
    assert torch.func.grad(torch.func.grad(cube))(x).item() == 12.0
