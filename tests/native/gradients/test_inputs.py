from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop
from tests._support.common import needs_native
from tests.native.gradients.recording import (
    all_native,
    differentiable,
    leaf,
    make_formula,
    on_both_paths,
)

pytestmark = needs_native


@pytest.mark.parametrize(
    "mode", [torch.no_grad, torch.inference_mode, lambda: torch.set_grad_enabled(False)]
)
def test_modes_without_grad(cube, mode):
    def scenario():
        x = leaf()
        with mode():
            y = cube(x)
        return y.requires_grad, y.grad_fn, y.is_inference(), y.item()

    on_both_paths(cube, scenario)


def test_parameter_of_a_module(cube):
    def scenario():
        parameter = torch.nn.Parameter(torch.full((2,), 2.0))
        y = cube(parameter)
        y.sum().backward()
        return type(y), parameter.grad.tolist()

    assert on_both_paths(cube, scenario) == (Tensor, [12, 12])


def test_view_of_a_tensor_that_requires_grad(cube):
    def scenario():
        x = leaf(1.0, 2.0)
        y = cube(x[1:])
        y.sum().backward()
        return x.grad.tolist()

    assert on_both_paths(cube, scenario) == [0, 12]


def test_view_whose_base_requires_grad_later(cube):
    def scenario():
        base = torch.full((2,), 2.0, dtype=torch.float64)
        view = base[:1]
        base.mul_(leaf(3.0, 3.0))
        y = cube(view)
        return y.requires_grad, y.item()

    assert on_both_paths(cube, scenario) == (True, 216)


def test_view_created_in_no_grad_requires_grad_like_its_base(namespace):
    seen = []

    def backward(ctx, grad):
        seen.append(ctx.needs_input_grad)
        return grad, grad

    op = differentiable(namespace, lambda x, y: x + y, "(Tensor x, Tensor y) -> Tensor", backward)

    def scenario():
        x, base = leaf(), leaf()
        with torch.no_grad():
            view = base[:]
        seen.clear()
        op(x, view).sum().backward()
        return list(seen), x.grad.item(), base.grad

    assert on_both_paths(op, scenario) == ([(True, True)], 1, None)


def test_rejected_input_does_not_change_versions(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x, y: y.clone(),
        mutates_args={"x"},
        schema="(Tensor(a!) x, Tensor y) -> Tensor",
    )
    op.register_autograd(lambda ctx, grad: (None, grad))
    make_formula(op)

    def scenario():
        x, base = torch.zeros(2), leaf(1.0, 2.0) * 1
        part, _ = base.split(1)
        base.mul_(2)
        with pytest.raises(RuntimeError, match="modified inplace"):
            op(x, part)
        return x._version

    assert on_both_paths(op, scenario) == 0


def test_dtypes_and_shapes(cube):
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.complex64):
        x = torch.ones(2, 3, 4, dtype=dtype, requires_grad=True)
        with all_native(cube):
            y = cube(x)
        y.backward(torch.ones_like(y))
        assert_close(x.grad, torch.full_like(x, 3))
    x = torch.ones(0, 3, requires_grad=True)
    with all_native(cube):
        cube(x).sum().backward()
    assert x.grad.shape == (0, 3)
