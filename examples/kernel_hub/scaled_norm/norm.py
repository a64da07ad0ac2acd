"""An operator with a fake kernel, a formula, a sharding rule and a second provider."""

import torch
from torch import Tensor

import torchop

from ._ops import NAMESPACE, add_op_namespace_prefix


@torchop.custom_op(add_op_namespace_prefix("rms_norm"), mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.empty_like(x)


def _setup_context(ctx, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, weight = ctx.saved_tensors
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
    weighted = grad * weight
    projection = (weighted * x).mean(-1, keepdim=True) * x * scale**3
    dims = tuple(range(x.ndim - 1))
    return weighted * scale - projection, (grad * x * scale).sum(dims), None


rms_norm.register_autograd(_backward, setup_context=_setup_context)
rms_norm.register_sharding("b h, h -> b h", whole="h")


@rms_norm.register_kernel("cpu", provider="float64")
def _(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.double()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def use_float64():
    """Return a context manager that makes this build, and no other, use double precision."""
    return torchop.priority({f"{NAMESPACE}::*": ["float64"]})
