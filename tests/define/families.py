from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchop


def exists(namespace: str, name: str) -> bool:
    return hasattr(getattr(torch.ops, namespace), name)


def forms_of(family: torchop.OperatorFamily) -> list[torchop.CustomOp[..., Any]]:
    return [op for op in (family.functional, family.out, family.inplace) if op is not None]


def write_sine(x: Tensor, *, out: Tensor) -> None:
    """Compute the sine with NumPy."""
    np.sin(x.numpy(), out=out.numpy())


def save_input(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def sine_backward(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * x.cos()


def sine(namespace: str, **options: Any) -> torchop.OperatorFamily:
    options = {"like": "x", "inplace": True, "elementwise": True, **options}
    family = torchop.out_op(f"{namespace}::sin", write_sine, **options)
    family.register_autograd(sine_backward, setup_context=save_input)
    return family


def write_bounds(
    x: Tensor, margin: float = 1.0, *, scale: int = 1, low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    low.copy_(x * scale - margin)
    high.copy_((x * scale).sum(-1) + margin)
    return low, high


def allocate_bounds(x: Tensor, margin: float, *, scale: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1])


def bounds(namespace: str) -> torchop.OperatorFamily:
    return torchop.out_op(f"{namespace}::bounds", write_bounds, allocate=allocate_bounds)


SAMPLES = {
    "plain": lambda: torch.randn(3, 4),
    "empty": lambda: torch.empty(0, 4),
    "scalar": lambda: torch.tensor(0.5),
    "double": lambda: torch.randn(3, 4, dtype=torch.double),
    "transposed": lambda: torch.randn(4, 3).t(),
    "sliced": lambda: torch.randn(3, 8)[:, ::2],
    "offset": lambda: torch.randn(20)[5:17].view(3, 4),
}
