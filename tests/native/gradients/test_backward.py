"""The backward of autograd nodes that native calls created. Uses private names."""

from __future__ import annotations

from types import BuiltinFunctionType

import pytest
import torch

from tests._support.common import needs_native
from tests.native.gradients.recording import all_native, differentiable, leaf, save_inputs
from torchop._compat import autograd
from torchop._native import switch
from torchop._rules.autograd.rule import AutogradRule

pytestmark = needs_native


def test_backward_has_no_torchop_frame(cube):
    apply = autograd.context_type(cube._definition.rule(AutogradRule).function).apply
    assert type(apply) is BuiltinFunctionType
    x = leaf()
    with all_native(cube):
        cube(x).backward()
    assert x.grad.item() == 12.0


def test_backward_inside_of_another_backward(namespace):
    """The formula runs another backward, which must not replace the saved tensors of `ctx`."""

    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        if x > 4:  # only in the outer backward: compute the factor 2 with another backward
            with torch.enable_grad():
                inner = leaf()
                (two,) = torch.autograd.grad(op(inner), inner)
            assert ctx.saved_tensors[0] is x
            return grad * x * two / 2
        return 2 * grad * x

    op = differentiable(
        namespace, lambda x: x.square(), "(Tensor x) -> Tensor", backward, save_inputs
    )
    x = leaf(5.0)
    with all_native(op):
        op(x).backward()
    assert x.grad.item() == 10.0


def test_interrupt_is_not_reported_as_a_formula_error(namespace):
    def backward(ctx, grad):
        raise KeyboardInterrupt

    op = differentiable(namespace, lambda x: x.square(), "(Tensor x) -> Tensor", backward)
    with pytest.raises(KeyboardInterrupt):
        op(leaf()).backward()


def test_a_formula_below_a_compiled_frame_is_not_traced(cube):
    cube.register_fake(torch.empty_like)
    graphs = []

    def backend(graph, examples):
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    @torch.compile(backend=backend)
    def step(x):
        y = x.sin()
        torch._dynamo.graph_break()
        cube(y.detach().requires_grad_()).sum().backward()
        return x.cos()

    cube(leaf()).backward()
    step(torch.ones(2, dtype=torch.float64))
    assert graphs
    assert not any("square" in target for graph in graphs for target in graph)


def test_a_later_formula_serves_earlier_calls(namespace):
    op = differentiable(namespace, lambda x: x.square(), "(Tensor x) -> Tensor", lambda ctx, g: g)
    x = leaf()
    y = op(x)
    op.register_autograd(lambda ctx, grad: 7 * grad)
    y.backward()
    assert x.grad.item() == 7.0
    op.register_autograd(lambda ctx, grad: ctx.missing)
    with pytest.raises(AttributeError, match="missing") as caught:
        op(x).backward()
    assert "has no setup_context" in caught.value.__notes__[0]


def test_node_rejects_other_calls():
    make = switch.native_module().make_backward
    apply, _ = make(None, None, (), None, None, None, None, None, None, None)
    with pytest.raises(TypeError, match="apply expects the ctx of a node"):
        apply.__func__()
    with pytest.raises(TypeError, match="ten arguments, the third a tuple"):
        make(None)
