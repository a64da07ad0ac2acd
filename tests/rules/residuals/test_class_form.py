import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

import torchop


class Sine:
    """An operator whose members are named as in a proposal of residuals for PyTorch."""

    residuals = {"cosine": Tensor}  # noqa: RUF012  (as in the proposal)

    @staticmethod
    def forward(x: Tensor, scale: float = 2.0) -> Tensor:
        y = np.sin(x.numpy() * np.float32(scale))
        if not torchop.records_gradient():
            return torch.from_numpy(y)
        return torchop.residuals(torch.from_numpy(y), (x * scale).cos())

    @staticmethod
    def fake(x, scale=2.0):
        return torchop.residuals(torch.empty_like(x), torch.empty_like(x))

    @staticmethod
    def backward_kernel(grad: Tensor, x: Tensor, cosine: Tensor, scale: float) -> Tensor:
        return torch.from_numpy(grad.numpy() * cosine.numpy() * np.float32(scale))


def test_a_class_with_residuals(namespace):
    op = torchop.operator(f"{namespace}::op")(Sine)
    x = torch.tensor([0.5, 1.0], requires_grad=True)
    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    for function in (op, op, compiled):
        (gradient,) = torch.autograd.grad(function(x).sum(), x)
        assert_close(gradient, 2 * (2 * x).cos().detach())
    assert_close(op(x.detach()), (2 * x).sin().detach())
    # The backward kernel is an operator of its own, so compilers do not trace it. This operator has
    # no gradient formula, so computing second derivatives raises an error.
    assert "cosine" in str(getattr(torch.ops, namespace).op__backward_kernel.default._schema)
    (gradient,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
    with pytest.raises(torchop.MissingFormulaError, match="op__backward_kernel"):
        gradient.sum().backward()


def test_a_backward_kernel_with_a_formula_is_rejected(namespace):
    both = type("Both", (Sine,), {"backward": staticmethod(lambda ctx, grad: grad)})
    with pytest.raises(torchop.RuleSignatureError, match="takes a backward_kernel, or backward"):
        torchop.operator(f"{namespace}::both")(both)
    assert not hasattr(getattr(torch.ops, namespace), "both")
