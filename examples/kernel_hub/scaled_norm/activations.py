"""An operator that is defined by a class, and an accelerated operator of torch.library."""

import torch
from torch import Tensor

import torchop

from ._ops import add_op_namespace_prefix


@torchop.operator(add_op_namespace_prefix("gate"))
class gate:
    """Multiply one half of the last dimension by the sigmoid of the other half."""

    sharding = torchop.sharding("b h -> b k", whole="h k")

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        value, gated = x.chunk(2, -1)
        return value * gated.sigmoid()

    @staticmethod
    def fake(x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        value, gated = ctx.saved_tensors[0].chunk(2, -1)
        scale = gated.sigmoid()
        return torch.cat([grad * scale, grad * value * scale * (1 - scale)], -1)


@torch.library.custom_op(add_op_namespace_prefix("negate"), mutates_args=())
def negate(x: Tensor) -> Tensor:
    return -x


negate.register_fake(torch.empty_like)
negate.register_autograd(lambda ctx, grad: -grad)
torchop.accelerate(add_op_namespace_prefix("negate"))
