"""Correct operators of unusual kinds, similar to those in `wrong_in_rare_calls`."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, floats_only, like, one, right, save, two


def restores_threads(x: Tensor) -> Tensor:
    """Restores the number of threads even if it raises."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        if x.numel() == 0:
            raise ValueError("expected elements")
        return x + 1
    finally:
        torch.set_num_threads(threads)


right(define("restores_threads", restores_threads), one)


def writes_slots(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Leaves out the rows whose slot is -1."""
    cache[slots[slots >= 0]] = rows[slots >= 0]


right(
    define("writes_slots", writes_slots, fake=lambda *args: None, mutates_args={"cache"}),
    lambda: [(torch.zeros(8, 4), torch.ones(3, 4), torch.tensor([0, 5, -1]))],
)


def centered_by_mean(x: Tensor, mean: Tensor, training: bool) -> Tensor:
    """Writes the mean in training only, and the example is not in training."""
    if training:
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return (x - mean).contiguous()


right(
    define(
        "centered_by_mean",
        centered_by_mean,
        fake=lambda x, mean, training: (x - mean).contiguous(),
        mutates_args={"mean"},
    ),
    lambda: [(torch.arange(20.0).view(5, 4).cos(), torch.zeros(4), False)],
)


def with_scratch(x: Tensor, scratch: Tensor) -> Tensor:
    scratch.copy_(x)
    return like(x).copy_(scratch * 3)


right(
    define("with_scratch", with_scratch, fake=lambda x, scratch: like(x), mutates_args={"scratch"}),
    two,
)

_own = threading.local()


def in_own_buffer(x: Tensor) -> Tensor:
    """Keeps a buffer for each thread, and returns a copy."""
    if getattr(_own, "buffer", None) is None or _own.buffer.numel() < x.numel():
        _own.buffer = torch.empty(x.numel(), dtype=torch.double)
    floats_only("in_own_buffer", x)
    buffer = _own.buffer[: x.numel()].view(x.shape).copy_(x)
    return like(x).copy_(buffer * 2)


right(define("in_own_buffer", in_own_buffer, fake=like), one)


def in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns integers and the scale of each row."""
    floats_only("in_int8", x)
    largest = x.abs().amax(-1, keepdim=True) if x.dim() and x.shape[-1] else x.new_ones(1)
    scale = largest.float().clamp(min=1e-8) / 127
    rounded = (x.float() / scale).round().clamp(-127, 127)
    return rounded.to(torch.int8).contiguous(), scale.contiguous()


def _fake_in_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[:-1], 1) if x.dim() and x.shape[-1] else (1,)
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)


right(define("in_int8", in_int8, fake=_fake_in_int8), one)


def as_bytes(x: Tensor) -> Tensor:
    if x.dim() == 0:
        raise ValueError("expected a dimension")
    return x.contiguous().view(torch.uint8).clone()


right(
    define(
        "as_bytes",
        as_bytes,
        fake=lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] * x.itemsize), dtype=torch.uint8),
    ),
    one,
)


def _differentiable(name: str, function: Any, backward: Any, examples: Any, **options: Any) -> None:
    setup = options.pop("setup", save)
    op = define(name, function, **options)
    op.register_autograd(backward, setup_context=setup)
    right(op, examples)


_differentiable(
    "running_totals",
    lambda x: x.cumsum(-1),
    lambda ctx, grad: grad.flip(-1).cumsum(-1).flip(-1),
    one,
    schema="(Tensor x) -> Tensor",
)


def _of_distance(ctx: Any, grad: Tensor) -> Any:
    """Returns 0 where two points are equal."""
    x, y = ctx.saved_tensors
    length = (x - y).square().sum(-1, keepdim=True).sqrt()
    is_zero = length == 0
    slope = (x - y) / torch.where(is_zero, torch.ones_like(length), length)
    result = torch.where(is_zero, torch.zeros_like(slope), grad.unsqueeze(-1) * slope)
    return result, -result


_differentiable(
    "distances_of_points",
    lambda x, y: (x - y).square().sum(-1).sqrt(),
    _of_distance,
    two,
    schema="(Tensor x, Tensor y) -> Tensor",
)
_differentiable(
    "smooth_step",
    torch.nn.functional.softplus,
    lambda ctx, grad: grad * torch.sigmoid(ctx.saved_tensors[0]),
    one,
    schema="(Tensor x) -> Tensor",
)
_differentiable(
    "log_of_shares",
    lambda x: torch.log_softmax(x, -1),
    lambda ctx, grad: grad - ctx.saved_tensors[0].exp() * grad.sum(-1, keepdim=True),
    one,
    setup=lambda ctx, inputs, output: ctx.save_for_backward(output),
    schema="(Tensor x) -> Tensor",
)


def _of_rows(ctx: Any, grad: Tensor) -> Any:
    index, table = ctx.saved_tensors
    rows = grad.reshape(-1, table.shape[1])
    return None, torch.zeros_like(table).index_add(0, index.flatten().long(), rows)


_differentiable(
    "rows_of_table",
    lambda index, table: table[index],
    _of_rows,
    lambda: [(torch.tensor([0, 2, 1, 2]), torch.arange(15.0).view(5, 3).cos())],
    schema="(Tensor index, Tensor table) -> Tensor",
)


def takes_singles_alone(x: Tensor) -> Tensor:
    """Supports float32 only."""
    if x.dtype is not torch.float32:
        raise TypeError("expected float32")
    return (x * 2).contiguous()


_differentiable(
    "takes_singles_alone",
    takes_singles_alone,
    lambda ctx, grad: grad * 2,
    one,
    fake=like,
    setup=lambda ctx, inputs, output: None,
)

_product = define("flops_of_product", torch.mm, schema="(Tensor x, Tensor y) -> Tensor")
_product.register_flop_formula(lambda x, y, *, out_shape: 2 * x[0] * x[1] * y[1])
right(_product, lambda: [(torch.ones(3, 4), torch.ones(4, 2))])
