"""Compilers do not trace the Python code of kernels and rules."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.exc
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.devices import BACKEND, TYPE
from tests.integration.compile.cases import define_cube
from tests.integration.compile.graphs import Recorder


def test_a_kernel_registered_after_compilation_runs_without_compiling_again(namespace):
    cube = define_cube(namespace)
    recorder = Recorder("aot_eager")
    compiled = torch.compile(lambda x: cube(x), backend=recorder, fullgraph=True)
    compiled(torch.ones(2))
    cube.register_kernel(TYPE, lambda x, shift=0.0: torch.full_like(x, 5.0))
    assert_close(compiled(torch.ones(2)), torch.full((2,), 5.0))
    assert len(recorder.graphs) == 1


def test_calls_in_eager_mode_do_not_recompile_a_graph(namespace):
    cube = define_cube(namespace)
    recorder = Recorder()
    compiled = torch.compile(lambda x: cube(x), backend=recorder, fullgraph=True)
    compiled(torch.ones(2))
    cube(torch.ones(2))
    cube(torch.ones(2, requires_grad=True))
    compiled(torch.ones(2))
    assert len(recorder.graphs) == 1


def test_compiled_function_can_call_hasattr_on_a_handle(namespace):
    cube = define_cube(namespace)

    @torch.compile(backend="eager", fullgraph=True)
    def function(x: Tensor) -> Tensor:
        return x if hasattr(cube, "mark") else cube(x)

    assert_close(function(torch.full((2,), 2.0)), torch.full((2,), 8.0))


@pytest.mark.parametrize("define", [torch.library.custom_op, torchop.custom_op])
def test_redefining_an_operator_recompiles_graphs_that_use_it(namespace, define):
    def double(x: Tensor) -> Tensor:
        return x * 2

    op = define(f"{namespace}::double", double, mutates_args=())
    op.register_fake(lambda x: torch.empty_like(x))
    op.register_autograd(lambda ctx, grad: grad * 2)
    recorder = Recorder("aot_eager")
    compiled = torch.compile(lambda x: op(x), backend=recorder, fullgraph=True)
    gradients, graphs = [], []
    for factor in (2, 5, None):
        if factor is None:
            op.register_fake(lambda x: torch.empty_like(x, dtype=torch.float64))
        else:
            op.register_autograd(lambda ctx, grad, factor=factor: grad * factor)
        for _ in range(2):
            x = torch.ones(2, requires_grad=True)
            result = compiled(x)
            result.sum().backward()
            gradients.append(x.grad[0].item())
            graphs.append(len(recorder.graphs))
    if define is torchop.custom_op:
        assert gradients == [2, 2, 5, 5, 5, 5]
        assert graphs == [1, 1, 2, 2, 3, 3]
    else:
        assert gradients == [2] * 6
        assert graphs == [1] * 6


def test_formulas_that_hold_tensors_are_distinguished(namespace):
    @dataclasses.dataclass
    class Scaled:
        by: Tensor

        def __call__(self, ctx, grad):
            return grad * self.by

    op = torchop.custom_op(
        f"{namespace}::double", lambda x: x * 2, schema="(Tensor x) -> Tensor", mutates_args=()
    )
    revisions = []
    # torchop must not compare the formulas with `==`, which raises because they hold tensors.
    for formula in (Scaled(torch.ones(2)), Scaled(torch.ones(2))):
        op.register_autograd(formula)
        revisions.append(op._definition.revision)
    assert revisions[0] < revisions[1]


# Dynamo reads the `.grad` of tensors that are not leaves. PyTorch warns about this, and Dynamo
# hides the warning unless warnings are errors, as in these tests.
_reads_grad = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)


def _opaque(namespace: str) -> Any:
    """Define an operator whose kernel and rules each call a different function of PyTorch.

    If a graph contains one of these functions, Dynamo has traced the kernel or the rule.
    """

    @torchop.custom_op(f"{namespace}::opaque", mutates_args=())
    def opaque(x: Tensor) -> Tensor:
        return torch.erfinv(x)

    @opaque.register_fake
    def _(x):
        return torch.empty_like(torch.digamma(x))

    opaque.register_autograd(
        lambda ctx, grad: torch.polygamma(1, grad),
        setup_context=lambda ctx, inputs, output: torch.lgamma(output),
    )
    return opaque


def _a_graph(op: Any, x: Tensor) -> Tensor:
    return op(x * 0.5)


def _a_resumed_frame(op: Any, x: Tensor) -> Tensor:
    y = x * 0.5
    torch._dynamo.graph_break()
    return op(y)


def _a_frame_left_to_python(op: Any, x: Tensor) -> Tensor:
    y = x
    for _ in range(2):
        with torch._dynamo.error_on_graph_break(False):
            # Dynamo cannot resume after a graph break in a loop and a context manager, so Python
            # runs this whole frame.
            torch._dynamo.graph_break()
        y = op(y * 0.5)
    return y


FRAMES = [_a_graph, _a_resumed_frame, _a_frame_left_to_python]


@pytest.mark.pairwise
@_reads_grad
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("through", ["handle", "overload"])
@pytest.mark.parametrize("frame", FRAMES)
def test_rules_are_never_traced(namespace, frame, through, requires_grad):
    handle = _opaque(namespace)
    op = handle if through == "handle" else handle.overload
    recorder = Recorder()
    compiled = torch.compile(lambda x: frame(op, x), backend=recorder)
    x = torch.full((2,), 0.5, requires_grad=requires_grad)
    assert_close(compiled(x), frame(op, x))
    assert _functions(recorder) <= {"mul", "opaque.default"}


@pytest.mark.parametrize(
    ("make", "is_traced"), [(torchop.Library, False), (torch.library.Library, True)]
)
def test_kernels_of_a_library_are_not_traced(namespace, make, is_traced):
    library = make(namespace, "FRAGMENT")
    library.define("op(Tensor x) -> Tensor")
    library.impl("op", lambda x: torch.erfinv(x), BACKEND)
    recorder = Recorder()
    op = getattr(torch.ops, namespace).op.default
    torch.compile(lambda x: _a_frame_left_to_python(op, x), backend=recorder)(torch.zeros(2))
    assert ("erfinv" in _functions(recorder)) is is_traced
    library._destroy()


def _functions(recorder: Recorder) -> set[str]:
    called = [node for g in recorder.graphs for node in g.graph.nodes if node.op.startswith("call")]
    return {getattr(node.target, "__name__", node.target) for node in called}


def test_a_compiled_function_called_inside_a_kernel_is_compiled(namespace):
    inner, outer = Recorder(), Recorder()
    compiled_inside = torch.compile(lambda x: x.cos() + 1, backend=inner)

    @torchop.custom_op(f"{namespace}::compiles", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return compiled_inside(x)

    op.register_fake(lambda x: torch.empty_like(x))
    function = torch.compile(lambda x: op(x) * 2, backend=outer, fullgraph=True)
    x = torch.randn(3)
    assert_close(op(x), x.cos() + 1)
    assert_close(function(x), 2 * (x.cos() + 1))
    assert len(inner.graphs) == len(outer.graphs) == 1
    assert _functions(inner) == {"cos", "add"}
