"""Residuals with parts that are not tensors."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop


@dataclasses.dataclass
class Saved:
    lse: Tensor
    blocks: int
    mask: Optional[Tensor]
    tag: Optional[str]
    dtype: torch.dtype


def scale(x: Tensor, factor: int) -> Tensor:
    tag = "even" if factor % 2 == 0 else None
    saved = Saved(x + factor, factor, None, tag, torch.float16)
    return torchop.residuals(x * factor, saved, factor, "linear")


def setup_context(ctx: Any, inputs: Any, output: Any, residuals: Any) -> None:
    saved, factor = residuals.saved, inputs[1]
    assert type(saved) is Saved
    assert (saved.blocks, saved.mask, saved.dtype) == (factor, None, torch.float16)
    assert saved.tag == ("even" if factor % 2 == 0 else None)
    assert (residuals.count, residuals.mode) == (factor, "linear")
    ctx.save_for_backward(saved.lse)
    ctx.factor = residuals.count


def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (lse,) = ctx.saved_tensors
    return grad * ctx.factor + lse * 0, None


def backward_kernel(grad: Tensor, x: Tensor, saved: Saved, mode: str) -> Tensor:
    assert (type(saved), mode) == (Saved, "linear")
    return grad * saved.blocks


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize("backend", ["none", "eager", "aot_eager", "inductor"])
def test_residuals_hold_values_of_many_types(namespace: str, backend: str, is_kernel: bool) -> None:
    residuals = {"saved": Saved, "count": int, "mode": str}
    op = torchop.custom_op(f"{namespace}::op", scale, mutates_args=(), residuals=residuals)
    op.register_fake(scale)
    if is_kernel:
        op.register_autograd(backward_kernel=backward_kernel)
    else:
        op.register_autograd(backward, setup_context=setup_context)
    run = op if backend == "none" else torch.compile(op, fullgraph=True, backend=backend)
    for factor in (2, 3, 2):
        x = torch.ones(3, requires_grad=True)
        run(x, factor).sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [factor] * 3
