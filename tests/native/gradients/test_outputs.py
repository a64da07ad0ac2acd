from __future__ import annotations

import contextlib
import copy
import pickle

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
)

pytestmark = needs_native


# --------------------------------------------------------------------------------------------------
# Outputs


def test_integer_outputs_have_no_gradient(namespace):
    op = differentiable(
        namespace,
        lambda x: (x * 2, x.long()),
        "(Tensor x) -> (Tensor, Tensor)",
        lambda ctx, grad, index: grad * 2 if index is None else grad * 2 + index,
    )

    def scenario():
        x = leaf(3.0)
        doubled, index = op(x)
        doubled.sum().backward()
        return doubled.requires_grad, index.requires_grad, index.grad_fn, x.grad.item()

    assert on_both_paths(op, scenario) == (True, False, None, 2)


def test_single_integer_output(namespace):
    op = differentiable(
        namespace, lambda x: x.long(), "(Tensor x) -> Tensor", lambda ctx, grad: grad
    )
    assert on_both_paths(op, lambda: (op(leaf()).requires_grad, op(leaf()).grad_fn)) == (
        False,
        None,
    )


def test_outputs_that_are_marked_non_differentiable(namespace):
    op = differentiable(
        namespace,
        lambda x: (x * 2, x * 3),
        "(Tensor x) -> (Tensor, Tensor)",
        lambda ctx, first, second: first * 2,
        lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1]),
    )

    def scenario():
        x = leaf()
        first, second = op(x)
        first.sum().backward()
        return first.requires_grad, second.requires_grad, second.grad_fn, x.grad.item()

    assert on_both_paths(op, scenario) == (True, False, None, 2)


@pytest.mark.parametrize("materialize", [True, False])
def test_gradient_of_an_output_that_is_not_used(namespace, materialize):
    seen = []

    def backward(ctx, first, second):
        seen.append([None if grad is None else grad.tolist() for grad in (first, second)])
        return first

    op = differentiable(
        namespace,
        lambda x: (x * 1, x * 2),
        "(Tensor x) -> (Tensor, Tensor)",
        backward,
        lambda ctx, inputs, output: ctx.set_materialize_grads(materialize),
    )

    def scenario():
        seen.clear()
        op(leaf(1.0, 2.0))[0].sum().backward()
        return list(seen)

    assert on_both_paths(op, scenario) == [[[1, 1], [0, 0] if materialize else None]]


def test_many_outputs_share_a_node(namespace):
    op = differentiable(
        namespace,
        lambda x: (x * 1, x * 2, x * 3),
        "(Tensor x) -> (Tensor, Tensor, Tensor)",
        lambda ctx, a, b, c: a + 2 * b + 3 * c,
    )

    def scenario():
        x = leaf()
        outputs = op(x)
        (outputs[0] * outputs[2]).sum().backward()
        same = all(item.grad_fn is outputs[0].grad_fn for item in outputs)
        return type(outputs), same, [item.output_nr for item in outputs], x.grad.item()

    assert on_both_paths(op, scenario) == (tuple, True, [0, 1, 2], 12)


def test_output_with_its_own_autograd_history_is_detached(namespace):
    """Kernels run below autograd, so tensors from a kernel's closure get no gradient."""
    outside = leaf(5.0)
    op = differentiable(
        namespace, lambda x: x + outside, "(Tensor x) -> Tensor", lambda ctx, grad: grad
    )

    def scenario():
        x = leaf()
        outside.grad = None
        op(x).sum().backward()
        return x.grad.item(), outside.grad

    assert on_both_paths(op, scenario) == (1, None)


CACHED = torch.ones(1, dtype=torch.float64)


def with_grad_inside(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x.detach().requires_grad_() * 2


RESULTS = {
    "a view of something new": lambda x: torch.cat([x, x])[1:],
    "a tensor that was returned before": lambda x: CACHED,
    "a leaf that requires grad": lambda x: (x * 2).detach().requires_grad_(),
    "a parameter": lambda x: torch.nn.Parameter(x * 2),
    "a tensor with a graph of its own": with_grad_inside,
    "an inference tensor": lambda x: torch.inference_mode()(lambda: torch.ones(1))(),
    "a conjugated tensor": lambda x: (x * 2j).conj(),
    "a sparse tensor": lambda x: x.to_sparse(),
    "a meta tensor": lambda x: x.to("meta"),
    "a scalar": lambda x: x.sum(),
    "an expanded tensor": lambda x: x.clone().expand(3, 1),
    "an empty tensor": lambda x: x.new_empty(0),
    "a subclass": lambda x: (x * 2).as_subclass(OwnTensor),
}


class OwnTensor(Tensor):
    pass


@pytest.mark.parametrize("kind", RESULTS)
def test_unusual_results_are_treated_the_same(namespace, kind):
    op = differentiable(
        namespace,
        RESULTS[kind],
        "(Tensor x) -> Tensor",
        lambda ctx, grad: torch.ones(1, dtype=torch.float64),
    )

    def scenario():
        log = []
        x = leaf()
        for argument in (x, x * 1, x.detach()):
            y = op(argument)
            log += [type(y), y.shape, y.layout, y.device.type, y.is_conj(), y.is_leaf]
            log += [y.requires_grad, y.is_inference(), y.grad_fn and y.grad_fn.name(), y._is_view()]
            if y.requires_grad and not y.is_leaf:
                (y.to_dense() if y.is_sparse else y).abs().sum().backward()
        return log, x.grad and x.grad.item()

    with all_native(op):
        native = outcome(scenario)
    CACHED.detach_()
    with torchop.native.disabled():
        dispatched = outcome(scenario)
    CACHED.detach_()
    assert native == dispatched


def modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("with_grad", [True, False])
def test_kernel_runs_without_grad_and_below_autograd(namespace, with_grad, fails):
    seen = []

    def kernel(x):
        inner = x * 1
        seen.append((modes(), x.requires_grad, inner.requires_grad))
        if fails:
            raise ValueError("the kernel fails")
        return inner + 1

    def setup_context(ctx, inputs, output):
        seen.append((modes(), inputs[0].requires_grad, output.requires_grad))

    op = differentiable(
        namespace, kernel, "(Tensor x) -> Tensor", lambda ctx, grad: grad, setup_context
    )

    def scenario():
        seen.clear()
        before = modes()
        with contextlib.suppress(ValueError):
            op(leaf().requires_grad_(with_grad))
        assert modes() == before == (True, True)
        return list(seen)

    on_both_paths(op, scenario)


# --------------------------------------------------------------------------------------------------
# Copying, pickling and reusing results


def test_result_is_an_ordinary_tensor(cube):
    def scenario():
        y = cube(leaf(2.0, 3.0))
        refused = outcome(lambda: copy.deepcopy(y))
        detached = copy.deepcopy(y.detach())
        loaded = pickle.loads(pickle.dumps(y.detach()))
        return type(y), refused, detached.tolist(), loaded.tolist(), y[0].item()

    on_both_paths(cube, scenario)
