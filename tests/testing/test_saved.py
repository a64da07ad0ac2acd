"""saved_bytes measures the memory that a call keeps alive for backward."""

import torch
from torch import Tensor

import torchop
from torchop.testing import saved_bytes


def test_each_storage_counts_once():
    x = torch.zeros(100, requires_grad=True)
    assert saved_bytes(lambda x: x * x, x) == 400
    assert saved_bytes(lambda x: (x * 2).exp()[:1].exp(), x) == 400 + 4
    assert saved_bytes(lambda x: x * x, x.detach()) == 0


def test_residuals_and_attributes_of_ctx_are_counted(namespace):
    def compute(x: Tensor) -> Tensor:
        return torchop.residuals(x * 2, x.double(), x > 0)

    op = torchop.custom_op(
        f"{namespace}::op",
        compute,
        mutates_args=(),
        residuals={"wide": Tensor, "mask": Tensor},
    )

    def setup_context(ctx, inputs, output, residuals):
        ctx.save_for_backward(residuals.wide)
        ctx.mask = residuals.mask

    op.register_autograd(lambda ctx, grad: grad * 2, setup_context=setup_context)
    x = torch.zeros(100, requires_grad=True)
    for _ in range(2):
        assert saved_bytes(op, x) == 800 + 100
    with torch.no_grad():
        assert saved_bytes(op, x) == 0
