from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import torchop
from tests.integration.device import target
from tests.integration.device.target import TYPE
from tests.rules.user.sharding import ranks
from torchop.testing import check_sharding

pytestmark = target.needs_accelerator


def product(namespace: str, reduce: str = "sum") -> Any:
    op = torchop.custom_op(
        f"{namespace}::product",
        lambda x, y: x @ y,
        mutates_args=(),
        schema="(Tensor x, Tensor y) -> Tensor",
    )
    op.register_fake(lambda x, y: x.new_empty(x.shape[0], y.shape[1]))

    def backward(ctx: Any, grad: Tensor) -> Any:
        x, y = ctx.saved_tensors
        return grad @ y.mT, x.mT @ grad

    op.register_autograd(
        backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
    )
    op.register_sharding("b k, k n -> b n", reduce={"k": reduce}, linear=(0, 1))
    return op


def arguments() -> tuple[Tensor, Tensor]:
    x = torch.arange(8.0, device=TYPE).reshape(2, 4) / 8
    return x, torch.arange(8.0, device=TYPE).reshape(4, 2) / 4


def test_a_rule_is_checked_on_the_device(namespace: str) -> None:
    assert check_sharding(product(namespace), arguments()).placements > 9
    with pytest.raises(torchop.testing.OpCheckError, match="is wrong"):
        check_sharding(product(f"{namespace}_wrong", "max"), arguments())


@pytest.mark.parametrize("native", [True, False])
def test_gradients_of_shards(namespace: str, native: bool) -> None:
    op = product(namespace)
    expected = [value.requires_grad_() for value in arguments()]
    op(*expected).square().sum().backward()
    whole = [value.detach() for value in arguments()]
    way = torch.enable_grad() if native else torchop.native.disabled()
    with ranks.simulated_mesh((2,), TYPE) as mesh, way:
        x, y = (ranks.placed(value, mesh, [Replicate()]) for value in whole)
        x = x.redistribute(mesh, [Shard(1)]).requires_grad_()
        y.requires_grad_()
        op(x, y).square().sum().backward()
        for shards, value in zip((x, y), expected, strict=True):
            found = ranks.whole(shards.grad.full_tensor())
            assert found.device == value.device
            torch.testing.assert_close(found, value.grad)
