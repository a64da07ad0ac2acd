from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests.native.gradients.recording import (
    all_native,
    differentiable,
    leaf,
    on_both_paths,
    outcome,
    save_inputs,
)

pytestmark = needs_native

LISTS = {
    "a list": ("Tensor[]", lambda x, ys: [x * 2, ys[0] * x]),
    "a list of one": ("Tensor[]", lambda x, ys: [x * 2]),
    "an empty list": ("Tensor[]", lambda x, ys: []),
    "a tuple for a list": ("Tensor[]", lambda x, ys: (x * 2, ys[0] * x)),
    "a tensor and a list": ("(Tensor, Tensor[])", lambda x, ys: (x * 2, [ys[0] * x, x + 1])),
    "two lists": ("(Tensor[], Tensor[])", lambda x, ys: ([x * 2], [ys[0] * x, x + 1])),
    "a list and a number": ("(Tensor[], int)", lambda x, ys: ([x * 2, ys[0] * x], 7)),
    "a list with integers": ("Tensor[]", lambda x, ys: [x.long(), x * 2]),
    "a tensor and None": ("(Tensor, Tensor?)", lambda x, ys: (x * 2, None)),
    "a number and a tensor": ("(float, Tensor)", lambda x, ys: (0.5, x * 2)),
}


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("result", LISTS)
def test_results_that_are_lists(namespace, result, saves):
    returns, kernel = LISTS[result]
    seen = []

    def setup_context(ctx, inputs, output):
        seen.append((type(output), [type(item) for item in flat(output)], ctx.needs_input_grad))
        ctx.save_for_backward(*[item for item in flat(output) if isinstance(item, Tensor)])

    def backward(ctx, *grads):
        seen.append([[None if g is None else g.tolist() for g in flat(grad)] for grad in grads])
        if saves:
            seen.append([tensor.tolist() for tensor in ctx.saved_tensors])
        total = sum(
            g for grad in grads for g in flat(grad) if g is not None and g.is_floating_point()
        )
        return total * 2, [total * 3]

    op = differentiable(
        namespace,
        kernel,
        f"(Tensor x, Tensor[] ys) -> {returns}",
        backward,
        setup_context if saves else None,
    )

    def scenario():
        seen.clear()
        x, y = leaf(2.0, 3.0), leaf(5.0, 7.0)
        results = op(x, [y])
        tensors = [item for item in flat(results) if isinstance(item, Tensor)]
        wanted = [tensor for tensor in tensors if tensor.requires_grad]
        if wanted:
            sum(tensor.sum() * n for n, tensor in enumerate(wanted, 1)).backward()
        return (
            structure_of(results),
            [(tensor.tolist(), tensor.output_nr, tensor.requires_grad) for tensor in tensors],
            [x.grad is None or x.grad.tolist(), y.grad is None or y.grad.tolist()],
            list(seen),
        )

    structure, tensors, *_ = on_both_paths(op, scenario)
    assert structure != [] or tensors == []


def flat(value: Any) -> list[Any]:
    if isinstance(value, list | tuple):
        return [item for part in value for item in flat(part)]
    return [value]


def structure_of(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(structure_of(item) for item in value)
    return type(value).__name__


def test_second_derivative_through_a_list(namespace):
    def backward(ctx, grads):
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0] + 3 * x**2 * grads[1]

    op = differentiable(
        namespace, lambda x: [x**2, x**3], "(Tensor x) -> Tensor[]", backward, save_inputs
    )

    def scenario():
        x = leaf(2.0)
        square, cube = op(x)
        (first,) = torch.autograd.grad(square + cube, x, create_graph=True)
        (second,) = torch.autograd.grad(first, x)
        return first.item(), second.item()

    assert on_both_paths(op, scenario) == (16, 14)


def test_result_list_is_a_copy_of_the_kernels_list(namespace):
    kept = []

    def kernel(x):
        kept.append([x + 1])
        return kept[-1]

    op = differentiable(namespace, kernel, "(Tensor x) -> Tensor[]", lambda ctx, grads: grads[0])

    def scenario():
        with_grad, without = op(leaf()), op(leaf().detach())
        return with_grad is kept[-2], without is kept[-1], kept[-2][0].requires_grad

    assert on_both_paths(op, scenario) == (False, False, True)


def test_a_list_with_the_same_tensor_twice_is_refused(namespace):
    op = differentiable(
        namespace,
        lambda x: (lambda y: [y, y])(x + 1),
        "(Tensor x) -> Tensor[]",
        lambda ctx, grads: grads[0],
    )
    for x in (leaf(), leaf().detach()):
        with all_native(op):
            native = outcome(functools.partial(op, x))
        with torchop.native.disabled():
            dispatched = outcome(functools.partial(op, x))
        assert native == dispatched
        assert native[0] is torchop.AliasError
