"""Registers the faulty operators in three ways: `custom_op`, `Library` and `TORCH_LIBRARY`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def strides(x: Tensor) -> Tensor:
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory[x.storage_offset() :][: x.numel()].reshape(x.shape).clone()


def fake_strides(x: Tensor) -> Tensor:
    return (x + 1).contiguous()


def write(x: Tensor) -> Tensor:
    return x.to(torch.float32).clamp_(-0.5, 0.5).contiguous().to(x.dtype, copy=True)


def alias(x: Tensor) -> Tensor:
    return x.contiguous().to(torch.float64)


def narrow(x: Tensor) -> Tensor:
    small = x.to(torch.int32)
    return (small + small).contiguous().to(torch.int64)


def tail(x: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype)
    count = x.numel() // 1024 * 1024 if x.numel() > 1024 else x.numel()
    result.view(-1)[:count] = x.reshape(-1)[:count]
    return result


def gradient(x: Tensor, weight: Tensor) -> Tensor:
    return x * weight


def crash(x: Tensor) -> Tensor:
    if x.numel() == 0:
        os.abort()
    return x.clone(memory_format=torch.contiguous_format)


KERNELS: dict[str, Callable[..., Tensor]] = {
    kernel.__name__: kernel
    for kernel in (strides, fake_strides, write, alias, narrow, tail, gradient, crash)
}


def _fake(name: str) -> Callable[..., Tensor]:
    if name == "fake_strides":
        return lambda x: torch.empty_like(x)
    if name == "gradient":
        return lambda x, weight: x * weight
    dtypes = {"alias": torch.float64, "narrow": torch.int64}
    return lambda x: torch.empty(x.shape, dtype=dtypes.get(name, x.dtype), device=x.device)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def backward(ctx: Any, grad: Tensor) -> Any:
    """Sums over the first dimension, although `weight` may have size 1 there, or elsewhere."""
    x, weight = ctx.saved_tensors
    return grad * weight, (grad * x).sum(0)


LIBRARY = torch.library.Library("planted_library", "FRAGMENT")
for name, kernel in KERNELS.items():
    handle = torch.library.custom_op(f"planted_custom::{name}", kernel, mutates_args=())
    handle.register_fake(_fake(name))
    if name == "gradient":
        handle.register_autograd(backward, setup_context=_save)
    arguments = "Tensor x, Tensor weight" if name == "gradient" else "Tensor x"
    LIBRARY.define(f"{name}({arguments}) -> Tensor")
    LIBRARY.impl(name, kernel, "CPU")
    namespaces = ["planted_library", "planted_cpp"]
    if library := os.environ.get("PLANTED_LIBRARY"):
        torch.ops.load_library(library)
    else:
        namespaces.remove("planted_cpp")
    for namespace in namespaces:
        torch.library.register_fake(f"{namespace}::{name}", _fake(name))
        if name == "gradient":
            torch.library.register_autograd(f"{namespace}::{name}", backward, setup_context=_save)
NAMESPACES = ("planted_custom", *namespaces)
