from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.combinations import BACKENDS
from tests._support.devices import OTHER, TYPE
from tests.define.families import (
    bounds,
    forms_of,
    save_input,
    sine,
    sine_backward,
    write_sine,
)


def test_kernel_for_a_device_serves_all_forms(namespace: str) -> None:
    family = sine(namespace, device_types=OTHER)
    x = torch.randn(3)
    for op in forms_of(family):
        with pytest.raises(NotImplementedError, match=f"kernels for: {OTHER}"):
            op(x, **({"out": torch.empty(3)} if op is family.out else {}))
    assert family.register_kernel(TYPE)(write_sine) is write_sine
    assert family.inplace is not None
    results = family(x), family(x, out=torch.empty(3)), family.inplace(x.clone())
    assert all(torch.allclose(result, x.sin()) for result in results)


def test_kernel_without_defaults_gets_the_schemas_defaults(namespace: str) -> None:
    family = bounds(namespace)

    @family.register_kernel(TYPE)
    def _(x, margin, *, scale, low, high):
        low.fill_(margin)
        high.fill_(scale)

    low, high = family(torch.randn(3, 4))
    assert low.unique().tolist() == [1]
    assert high.unique().tolist() == [1]
    assert family(torch.randn(2, 2), low=torch.empty(2, 2), high=torch.empty(2))[1].tolist() == [
        1,
        1,
    ]


def test_kernel_with_other_parameters_is_refused_for_all_forms(
    family: torchop.OperatorFamily,
) -> None:
    with pytest.raises(TypeError, match=r"sin\.out: a kernel is called with \(x, \*, out\)"):
        family.register_kernel("cpu", lambda x: None)
    with pytest.raises(RuntimeError, match="device type"):
        family.register_kernel("no_such_device", write_sine)
    assert torch.allclose(family(torch.ones(2)), torch.ones(2).sin())


def test_forms_own_kernel_is_checked_too(
    family: torchop.OperatorFamily,
) -> None:
    @family.out.register_kernel("cpu")
    def _(x: Tensor, *, out: Tensor) -> Tensor:
        return out.fill_(7)

    assert family(torch.ones(2), out=torch.empty(2)).tolist() == [7, 7]
    assert torch.allclose(family(torch.ones(2)), torch.ones(2).sin())
    with pytest.raises(torchop.MutationError, match="shape"):
        family(torch.ones(2), out=torch.empty(3))


def test_kernel_with_another_result_is_rejected(namespace: str) -> None:
    @torchop.out_op(f"{namespace}::lost", like="x", inplace=True)
    def lost(x: Tensor, *, out: Tensor) -> Tensor:
        return x.sin()

    assert lost.inplace is not None
    for call in (lambda x: lost(x), lambda x: lost(x, out=torch.empty(2)), lost.inplace):
        with pytest.raises(torchop.ResultError, match="must write into out and return that, or No"):
            call(torch.ones(2))


@pytest.mark.parametrize("results", ["None", "too many", "a number"])
def test_allocation_rule_with_another_result_is_rejected(namespace: str, results: str) -> None:
    made = {"None": None, "too many": (torch.empty(2), torch.empty(2)), "a number": 3}[results]
    family = torchop.out_op(f"{namespace}::op", write_sine, allocate=lambda x: made)
    with pytest.raises(torchop.ResultError, match="allocate must return"):
        family(torch.ones(2))


def test_allocation_rule_that_returns_an_input_is_rejected(namespace: str) -> None:
    family = torchop.out_op(f"{namespace}::op", write_sine, allocate=lambda x: x)
    x = torch.ones(2)
    with pytest.raises(torchop.AliasError, match="output 0 is input 'x' itself"):
        family(x)
    assert x.tolist() == [1, 1]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
@pytest.mark.parametrize("inplace", [False, True])
def test_gradients_flow_through_the_functional_and_the_inplace_form(
    family: torchop.OperatorFamily, backend: str | None, inplace: bool
) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        result = family.inplace(y) if inplace and family.inplace is not None else family(y)
        return (result * x).sum()

    x = torch.randn(3, dtype=torch.double, requires_grad=True)
    (expected,) = torch.autograd.grad(((x * 2).sin() * x).sum(), x)
    if backend is not None:
        function = torch.compile(function, backend=backend, fullgraph=True)
    (found,) = torch.autograd.grad(function(x), x)
    torch.testing.assert_close(found, expected)


def test_gradcheck_of_the_inplace_form(family: torchop.OperatorFamily) -> None:
    x = torch.randn(4, dtype=torch.double, requires_grad=True)
    assert family.inplace is not None
    assert torch.autograd.gradcheck(lambda x: family.inplace(x.clone()), x)
    assert torch.autograd.gradcheck(lambda x: family.inplace(x.clone()[1:]), x)
    written = x.clone()
    result = family.inplace(written)
    assert result is written
    assert written.grad_fn is not None


def test_transforms_go_through_the_inplace_form(family: torchop.OperatorFamily) -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        assert family.inplace is not None
        return family.inplace(y)

    x = torch.randn(3, dtype=torch.double)
    gradient = 2 * (2 * x).cos()
    torch.testing.assert_close(torch.func.grad(lambda x: function(x).sum())(x), gradient)
    torch.testing.assert_close(torch.func.jacrev(function)(x), gradient.diag())
    with pytest.raises(torchop.ForwardModeError, match="sin does not support forward-mode"):
        torch.func.jvp(function, (x,), (x,))


def test_inplace_form_treats_a_leaf_as_pytorch_does(family: torchop.OperatorFamily) -> None:
    x = torch.ones(2, requires_grad=True)
    assert family.inplace is not None
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        family.inplace(x)
    assert x.tolist() == [1, 1]
    with torch.no_grad():
        family.inplace(x)
    assert torch.allclose(x, torch.ones(2).sin())


def test_inplace_form_uses_the_functional_formula(namespace: str) -> None:
    family = torchop.out_op(f"{namespace}::sin", write_sine, like="x", inplace=True)
    x = torch.ones(2, requires_grad=True)
    assert family.inplace is not None
    with pytest.raises(torchop.MissingFormulaError, match=rf"{namespace}::sin\b"):
        family.inplace(x.clone()).sum().backward()
    assert family.register_autograd(sine_backward, setup_context=save_input) is sine_backward
    family.inplace(x.clone()).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(2).cos())


def test_kernel_that_resizes_its_output_is_refused(namespace: str) -> None:
    def grow(x: Tensor, *, out: Tensor) -> None:
        out.resize_(2 * x.numel()).fill_(1)

    def grow_the_second(x: Tensor, *, low: Tensor, high: Tensor) -> None:
        high.resize_(4)

    for kernel, name in ((grow, "out"), (grow_the_second, "high")):
        op = torchop.out_op(f"{namespace}::{kernel.__name__}", kernel, like="x")
        message = rf"into {name} without resizing it, but changed the shape from \[2\] to \[4\]"
        with pytest.raises(torchop.ResultError, match=message):
            op(torch.zeros(2))
