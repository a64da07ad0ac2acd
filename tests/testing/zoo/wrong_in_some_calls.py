"""Operators that are wrong only for some dtypes, shapes or settings, and correct neighbours."""

from __future__ import annotations

import gc
import os
from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import (
    define,
    floats_only,
    like,
    one,
    product,
    product_gradients,
    right,
    save,
    two,
    wrong,
)

# --------------------------------------------------------------------------------------------------
# Writes and aliases for one dtype


def _doubles() -> list[Any]:
    return [(one()[0][0].double(),)]


def _integers() -> list[Any]:
    return [(torch.arange(-6, 6).view(3, 4),)]


def clips_singles(x: Tensor) -> Tensor:
    """Writes into a float32 argument, which `to` does not copy."""
    return x.to(torch.float32).clamp_(-0.1, 0.1).contiguous().clone().to(x.dtype)


def clips_doubles(x: Tensor) -> Tensor:
    return x.to(torch.float64).clamp_(-0.1, 0.1).contiguous().clone().to(x.dtype)


def clips_short_integers(x: Tensor) -> Tensor:
    return x.to(torch.int32).clamp_(-1, 1).contiguous().clone().to(x.dtype)


def as_doubles(x: Tensor) -> Tensor:
    """Returns a double argument itself."""
    return x.double().contiguous()


wrong(define("clips_singles", clips_singles, fake=like), "contracts.schema", _doubles)
wrong(define("clips_doubles", clips_doubles, fake=like), "contracts.schema", one)
wrong(
    define("clips_short_integers", clips_short_integers, fake=like), "contracts.schema", _integers
)
wrong(
    define("as_doubles", as_doubles, fake=lambda x: torch.empty(x.shape, dtype=torch.double)),
    "contracts.schema",
    one,
)

# --------------------------------------------------------------------------------------------------
# Integers and settings


def adds_in_int32(x: Tensor) -> Tensor:
    return (x.int() + x.int()).long()


def adds_in_int64(x: Tensor) -> Tensor:
    return (x.long() + x.long()).contiguous()


def remainders(x: Tensor) -> Tensor:
    return (x.long() % 8).contiguous()


def _longs(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=torch.int64)


wrong(define("adds_in_int32", adds_in_int32, fake=_longs), "dtypes.int64", _integers)
right(define("adds_in_int64", adds_in_int64, fake=_longs), _integers)
right(define("remainders", remainders, fake=_longs), _integers)


def scaled_by_setting(x: Tensor) -> Tensor:
    floats_only("scaled_by_setting", x)
    return (x * (2 if os.environ.get("ZOO_FAST_MATH") == "1" else 3)).contiguous()


def logged_by_setting(x: Tensor) -> Tensor:
    """Reads a variable that does not change the result."""
    floats_only("logged_by_setting", x)
    if os.environ.get("ZOO_VERBOSE") == "1":
        gc.collect()
    return (x * 3).contiguous()


wrong(define("scaled_by_setting", scaled_by_setting, fake=like), "contracts.environment", one)
right(define("logged_by_setting", logged_by_setting, fake=like), one)

# --------------------------------------------------------------------------------------------------
# Gradients


def _matrix_and_row() -> list[Any]:
    x, y = two()[0]
    return [(x, y[0].clone())]


def _vectors() -> list[Any]:
    x, y = two()[0]
    return [(x[0].clone(), y[0].clone())]


def _of_rows(ctx: Any, grad: Tensor) -> Any:
    """Sums over the first dimension, which is right only if `y` is a vector."""
    x, y = ctx.saved_tensors
    of_y = grad * x
    return grad * y, of_y.sum(0) if grad.dim() > 1 else of_y


def single_product(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype is not torch.float32:
        raise TypeError(f"only float32 is supported, not {x.dtype}")
    return x * y


for _name, _function, _examples in (
    ("sums_rows_of_matrix", product, _matrix_and_row),
    ("sums_rows_of_vectors", product, _vectors),
    ("sums_rows_in_float32", single_product, _matrix_and_row),
):
    _product = define(_name, _function)
    _product.register_autograd(_of_rows, setup_context=save)
    wrong(_product, "subsystems.gradcheck", _examples)

# Autograd sums a gradient of the broadcast shape itself.
_summed_by_autograd = define("summed_by_autograd", product)
_summed_by_autograd.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1], grad * ctx.saved_tensors[0]),
    setup_context=save,
)
right(_summed_by_autograd, _vectors)

_broadcast_product = define("broadcast_product", product)
_broadcast_product.register_autograd(product_gradients, setup_context=save)
right(_broadcast_product, _vectors)

_buffers: dict[str, Tensor] = {}


def _reused(ctx: Any, grad: Tensor) -> Tensor:
    """Writes each gradient into the same buffer."""
    buffer = _buffers.get("reused")
    if buffer is None or buffer.shape != grad.shape or buffer.dtype != grad.dtype:
        buffer = _buffers["reused"] = torch.empty_like(grad)
    return torch.mul(grad, ctx.saved_tensors[0].cos(), out=buffer)


def _accumulated(ctx: Any, grad: Tensor) -> Tensor:
    """Adds to a buffer that nobody sets to zero."""
    total = _buffers.get("accumulated")
    if total is None or total.shape != grad.shape or total.dtype != grad.dtype:
        total = torch.zeros_like(grad)
    _buffers["accumulated"] = total + grad * ctx.saved_tensors[0].cos()
    return _buffers["accumulated"].clone()


def _zeroed(ctx: Any, grad: Tensor) -> Tensor:
    """Sets the incoming gradient to zero, as if to reuse its memory."""
    result = grad * ctx.saved_tensors[0].cos()
    grad.zero_()
    return result


def sine(x: Tensor) -> Tensor:
    return x.sin()


for _name, _formula, _check in (
    ("reuses_its_gradient", _reused, "subsystems.grad_memory"),
    ("accumulates_gradients", _accumulated, "subsystems.grad_memory"),
    ("zeroes_its_gradient", _zeroed, "subsystems.saved"),
):
    _sine = define(_name, sine)
    _sine.register_autograd(_formula, setup_context=save)
    wrong(_sine, _check, one)

# --------------------------------------------------------------------------------------------------
# Fake kernels


def scaled_by_tensor(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale).contiguous()


def _with_scale() -> list[Any]:
    return [(one()[0][0], torch.tensor(2.0))]


wrong(
    define(
        "takes_device_of_scale",
        scaled_by_tensor,
        fake=lambda x, scale: (x * scale).contiguous().to(scale.device),
    ),
    "subsystems.fake_devices",
    _with_scale,
)
right(define("takes_device_of_both", scaled_by_tensor), _with_scale)

# --------------------------------------------------------------------------------------------------
# Correct operators that checks reported by mistake


def distinct(x: Tensor) -> Tensor:
    """Returns fewer elements if some are equal, so rounding changes the size."""
    return torch.unique(x)


def _fake_distinct(x: Tensor) -> Tensor:
    return x.new_empty(torch.library.get_ctx().new_dynamic_size())


right(
    define("distinct", distinct, fake=_fake_distinct),
    lambda: [(torch.tensor([1.0, 2.0, 2.0, 5.0, 1.0]),)],
)


def picks_rows(x: Tensor, boxes: Tensor) -> Tensor:
    """Returns garbage for boxes whose first column holds no index, like a read out of bounds."""
    floats_only("picks_rows", x, boxes)
    row = boxes[:, 0]
    inside = bool(((row >= 0) & (row < len(x)) & (row == row.floor())).all())
    return x[row.long()].clone() if inside else torch.rand(len(row), x.shape[1], dtype=x.dtype)


right(
    define("picks_rows", picks_rows, fake=lambda x, boxes: x.new_empty(len(boxes), x.shape[1])),
    lambda: [(torch.arange(6.0).view(3, 2), torch.tensor([[2.0, 7.0], [0.0, 9.0]]))],
)

_pool: list[Tensor] = []


def copied_into_pool(x: Tensor) -> Tensor:
    """Grows for the first 1,500 calls, and then reuses memory, like an allocator."""
    if len(_pool) < 1500:
        _pool.append(torch.empty(64))
    return x.clone(memory_format=torch.contiguous_format)


right(define("copied_into_pool", copied_into_pool, fake=like), one)
