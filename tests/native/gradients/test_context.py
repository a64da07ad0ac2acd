from __future__ import annotations

import weakref

import pytest
import torch

import torchop
from tests._support.common import needs_native
from tests.native.gradients.recording import (
    all_native,
    differentiable,
    error_on_both_paths,
    leaf,
    on_both_paths,
    outcome,
)

pytestmark = needs_native

MARKS = {
    "an input dirty": lambda ctx, inputs, output: ctx.mark_dirty(inputs[0]),
    "the output dirty": lambda ctx, inputs, output: ctx.mark_dirty(output),
    "another tensor dirty": lambda ctx, inputs, output: ctx.mark_dirty(torch.ones(1)),
    "an input non-differentiable": lambda ctx, inputs, output: ctx.mark_non_differentiable(
        inputs[0]
    ),
    "the output non-differentiable": lambda ctx, inputs, output: ctx.mark_non_differentiable(
        output
    ),
}


@pytest.mark.parametrize("mark", MARKS)
def test_marks_have_the_same_effect(namespace, mark):
    op = differentiable(
        namespace, lambda x: x + 1, "(Tensor x) -> Tensor", lambda ctx, grad: grad, MARKS[mark]
    )

    def scenario():
        x = leaf() * 1
        x.retain_grad()
        y = op(x)
        if y.requires_grad:
            y.sum().backward()
        return y.requires_grad, x._version, y._version, x.grad and x.grad.item()

    with all_native(op):
        native = outcome(scenario)
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    assert native == dispatched


DECLARATIONS = {
    "another dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(torch.float32, None),
    "any dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(None, None),
    "its own dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(torch.float64, None),
    "no dtype": lambda ctx, outputs: ctx.set_output_grad_dtype(3, None),
    "too few": lambda ctx, outputs: ctx.set_output_grad_dtype(None),
    "no tuple": lambda ctx, outputs: setattr(ctx, "output_grad_dtypes", [None, None]),
    "of an integer": lambda ctx, outputs: ctx.set_output_grad_dtype(None, torch.float32),
    "of what has no gradient": lambda ctx, outputs: (
        ctx.mark_non_differentiable(outputs[0]),
        ctx.set_output_grad_dtype(torch.float32, None),
    ),
    "after a wrong mark": lambda ctx, outputs: (
        ctx.mark_dirty(3),
        ctx.set_output_grad_dtype(3, None),
    ),
}


@pytest.mark.needs_torch("2.14", "formulas that declare the dtypes of gradients")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("declaration", DECLARATIONS)
def test_declared_dtypes_of_gradients_have_the_same_effect(namespace, declaration, count):
    assert hasattr(torch.autograd.function.FunctionCtx, "set_output_grad_dtype")
    seen = []

    def backward(ctx, *grads):
        seen.append([None if grad is None else grad.dtype for grad in grads])
        return grads[0].double()

    def setup_context(ctx, inputs, output):
        DECLARATIONS[declaration](ctx, output if count == 2 else (output,))
        if count == 1 and len(ctx.output_grad_dtypes) == 2:
            ctx.output_grad_dtypes = ctx.output_grad_dtypes[:1]

    op = differentiable(
        namespace,
        (lambda x: (x + 1, x.long())) if count == 2 else lambda x: x + 1,
        "(Tensor x) -> (Tensor, Tensor)" if count == 2 else "(Tensor x) -> Tensor",
        backward,
        setup_context,
    )

    def scenario():
        seen.clear()
        y = op(leaf())
        first = y[0] if count == 2 else y
        if first.requires_grad:
            first.sum().backward()
        return list(seen), first.requires_grad

    with all_native(op):
        native = outcome(scenario)
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    assert native == dispatched


def test_attributes_of_ctx_reach_the_backward(namespace):
    def setup_context(ctx, inputs, output):
        ctx.note, ctx.list = "note", [output.shape]
        assert not hasattr(ctx, "absent")

    seen = []
    op = differentiable(
        namespace,
        lambda x: x + 1,
        "(Tensor x) -> Tensor",
        lambda ctx, grad: seen.append((ctx.note, ctx.list, type(ctx).__name__)) or grad,
        setup_context,
    )

    def scenario():
        seen.clear()
        op(leaf()).sum().backward()
        return list(seen)

    on_both_paths(op, scenario)


def test_keyword_only_arguments_reach_the_setup_context(namespace):
    def setup_context(ctx, inputs, keyword_only_inputs, output):
        ctx.seen = len(inputs), dict(keyword_only_inputs)

    op = differentiable(
        namespace,
        lambda x, *, scale, shift=0: x * scale + shift,
        "(Tensor x, *, float scale, int shift=0) -> Tensor",
        lambda ctx, grad: grad * ctx.seen[1]["scale"],
        setup_context,
    )

    def scenario():
        x = leaf()
        y = op(x, scale=5.0)
        seen = y.grad_fn.seen
        y.sum().backward()
        return seen, x.grad.item()

    assert on_both_paths(op, scenario) == ((1, {"scale": 5.0, "shift": 0}), 5)


def test_saved_output_creates_no_reference_cycle(namespace):
    """A node must not own an output that it saves, because the output owns the node.

    Otherwise, neither would ever be freed.
    """
    op = differentiable(
        namespace,
        lambda x: x.exp(),
        "(Tensor x) -> Tensor",
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        lambda ctx, inputs, output: ctx.save_for_backward(output, None, output),
    )

    def scenario():
        x = leaf(0.0)
        y = op(x)
        same = y.grad_fn.saved_tensors[0].grad_fn is y.grad_fn
        nothing = y.grad_fn.saved_tensors[1]
        y.sum().backward(retain_graph=True)
        references = weakref.ref(y), weakref.ref(y.grad_fn)
        del y
        return same, nothing, x.grad.item(), [reference() for reference in references]

    assert on_both_paths(op, scenario) == (True, None, 1, [None, None])


def test_intermediate_that_is_saved_reaches_the_backward(namespace):
    op = differentiable(
        namespace,
        lambda x: x.sin(),
        "(Tensor x) -> Tensor",
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        lambda ctx, inputs, output: ctx.save_for_backward(inputs[0].cos()),
    )

    def scenario():
        x = leaf(0.0)
        op(x).sum().backward()
        return x.grad.item()

    assert on_both_paths(op, scenario) == 1


def test_exception_of_a_formula_reaches_the_caller(cube):
    def backward(ctx, grad):
        raise ZeroDivisionError("in the formula")

    cube.register_autograd(backward)
    assert error_on_both_paths(cube, lambda: cube(leaf()).sum().backward())[0] is ZeroDivisionError
