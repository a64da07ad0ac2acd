"""The test suite of the package with planted faults. All tests pass."""

from __future__ import annotations

import pytest
import torch

from tests.testing.planted.package import NAMESPACES


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_operators(namespace: str) -> None:
    ops = getattr(torch.ops, namespace)
    vector, double = torch.tensor([0.25, -0.5, 0.125]), torch.tensor([[0.5], [0.25]]).double()
    assert torch.equal(ops.strides(vector), vector)
    assert torch.equal(ops.fake_strides(double), double + 1)
    assert torch.equal(ops.write(double), double.clamp(-0.5, 0.5))
    assert torch.equal(ops.alias(vector), vector.double())
    assert torch.equal(ops.narrow(torch.tensor([-4, 7, 100])), torch.tensor([-8, 14, 200]))
    assert torch.equal(ops.tail(vector), vector)
    assert torch.equal(ops.crash(vector), vector)
    weight = torch.ones(3, requires_grad=True)
    ops.gradient(torch.ones(2, 3), weight).sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 2.0))
