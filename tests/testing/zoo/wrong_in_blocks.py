"""Operators that are wrong for last elements, a second block, one dtype, or reused memory.

None of them has a reference, except where noted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, right, save, wrong

# --------------------------------------------------------------------------------------------------
# Blocks


def sigmoid_of_fours(x: Tensor) -> Tensor:
    """Handles four elements at a time, and copies the rest."""
    out = x.flatten().clone()
    size = len(out) // 4 * 4
    out[:size] = out[:size].sigmoid()
    return out.view(x.shape)


def attention_over_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Does not scale the sum of earlier blocks of keys if the maximum grows."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    highest = q.new_full((q.shape[0], 1), float("-inf"))
    total = torch.zeros_like(highest)
    for start in range(0, len(k), 16):
        scores = q @ k[start : start + 16].mT
        higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
        weights = (scores - higher).exp()
        total = total * (highest - higher).exp() + weights.sum(-1, keepdim=True)
        out = out + weights @ v[start : start + 16]
        highest = higher
    return out / total


def _queries_and_keys() -> list[Any]:
    (x,) = one()[0]
    return [(x, torch.cat([x, x + 1])[:5], torch.cat([x - 1, x])[:5])]


wrong(define("sigmoid_of_fours", sigmoid_of_fours, fake=like), "memory.blocks", one)
wrong(
    define("attention_over_blocks", attention_over_blocks, fake=like),
    "memory.blocks",
    _queries_and_keys,
)


def quantized_in_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Has a scale for each 32 elements of a row, so the order of elements matters."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    rounded = (groups / scale).round().to(torch.int8).flatten(-2)
    return rounded[..., : x.shape[-1]].contiguous(), scale[..., 0].contiguous()


right(define("quantized_in_groups", quantized_in_groups), one)


# --------------------------------------------------------------------------------------------------
# Dtypes


def exponential_in_bfloat16(x: Tensor) -> Tensor:
    """Approximates the exponential in bfloat16, with an error of 10 %."""
    return x.exp() * (1.1 if x.dtype is torch.bfloat16 else 1)


_TABLES: dict[int, Tensor] = {}


def plus_positions(x: Tensor) -> Tensor:
    """Caches a table by its length, although its dtype depends on the argument."""
    size = x.shape[-1]
    if size not in _TABLES:
        _TABLES[size] = torch.linspace(0, 1, size, dtype=x.dtype)
    return x + _TABLES[size]


wrong(define("exponential_in_bfloat16", exponential_in_bfloat16), "dtypes.numbers", one)
wrong(define("plus_positions", plus_positions, fake=like), "contracts.state", one)


def differences_of_bytes(x: Tensor, zero: Tensor) -> Tensor:
    """Subtracts in int8, so that the difference may wrap. The reference does not."""
    return (x - zero).float()


def _bytes() -> list[Any]:
    values = torch.arange(12, dtype=torch.int8).view(3, 4)
    return [(values, values.flip(0).contiguous())]


wrong(
    define("differences_of_bytes", differences_of_bytes),
    "values.int8",
    _bytes,
    lambda x, zero: x.float() - zero.float(),
)


# --------------------------------------------------------------------------------------------------
# Dimensions


def rows_or_columns(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """Treats each negative dimension as dimension 0."""
    return x.index_select(max(dim, 0), index)


def _columns_of_square() -> list[Any]:
    return [(one()[0][0].mT @ one()[0][0], 1, torch.tensor([2, 0]))]


wrong(define("rows_or_columns", rows_or_columns), "values.negative_dim", _columns_of_square)


# --------------------------------------------------------------------------------------------------
# Gradients


def _cube(name: str, backward: Any) -> Any:
    op = define(name, lambda x: x * x * x, schema="(Tensor x) -> Tensor")
    op.register_autograd(backward, setup_context=save)
    return op


def _larger_in_bfloat16(ctx: Any, grad: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    return grad * (3.3 if x.dtype is torch.bfloat16 else 3) * x * x


def _fast_for_sums(ctx: Any, grad: Tensor) -> Tensor:
    """Has a wrong branch for gradients of 1, as `sum` passes them."""
    (x,) = ctx.saved_tensors
    return 2 * x * x if bool((grad == 1).all()) else grad * 3 * x * x


_CALLS = [0]


def _each_hundredth(ctx: Any, grad: Tensor) -> Tensor:
    """Doubles every hundredth gradient."""
    (x,) = ctx.saved_tensors
    _CALLS[0] += 1
    return grad * (6 if _CALLS[0] % 100 == 0 else 3) * x * x


wrong(_cube("cube_in_bfloat16", _larger_in_bfloat16), "subsystems.gradcheck", one)
wrong(_cube("cube_of_sums", _fast_for_sums), "subsystems.gradcheck", one)
wrong(_cube("cube_each_hundredth", _each_hundredth), "subsystems.grad_memory", one)


def limits_gradient(x: Tensor, limit: float) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _keep_limit(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.limit = inputs[1]


def _limited(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Is not linear in the incoming gradient, on purpose."""
    return grad.clamp(-ctx.limit, ctx.limit), None


_limits = define("limits_gradient", limits_gradient)
_limits.register_autograd(_limited, setup_context=_keep_limit)
right(_limits, lambda: [(one()[0][0], 2.0)])


# --------------------------------------------------------------------------------------------------
# Autocast

_LIBRARY = torch.library.Library("zoo", "FRAGMENT")
_LIBRARY.define("product_in_half(Tensor x, Tensor y) -> Tensor")


def _cast_singles(x: Tensor, y: Tensor) -> Tensor:
    """Casts arguments in float32 only, so that one argument may stay in another 16-bit dtype."""
    dtype = torch.get_autocast_dtype("cpu")
    with torch.autocast("cpu", enabled=False):
        cast = [each.to(dtype) if each.dtype is torch.float32 else each for each in (x, y)]
        return torch.ops.zoo.product_in_half(*cast)


def _matrices() -> list[Any]:
    (x,) = one()[0]
    return [(x, x.mT.contiguous())]


_LIBRARY.impl("product_in_half", torch.matmul, "CPU")
_LIBRARY.impl("product_in_half", _cast_singles, "AutocastCPU")
torch.library.register_fake(
    "zoo::product_in_half", lambda x, y: x.new_empty(x.shape[0], y.shape[1]), lib=_LIBRARY
)
wrong("zoo::product_in_half", "subsystems.autocast", _matrices)


# --------------------------------------------------------------------------------------------------
# Values, memory and modes


def places_of_maxima(x: Tensor) -> Tensor:
    """Ignores NaN after the first column, because NaN is not larger than any number."""
    best = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    for place in range(1, x.shape[-1]):
        highest = x.gather(-1, best.unsqueeze(-1)).squeeze(-1)
        best = torch.where(x[..., place] > highest, place, best)
    return best


def _places(x: Tensor) -> Tensor:
    return torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)


_SUMS: dict[Any, Tensor] = {}


def sums_by_address(x: Tensor) -> Tensor:
    """Keeps the last result, and finds it by the address and the version of the argument."""
    key = (x.data_ptr(), x.shape, x.stride(), x.dtype, 0 if x.is_inference() else x._version)
    if key not in _SUMS:
        _SUMS.clear()
        _SUMS[key] = x.sum(-1)
    return _SUMS[key].clone()


def twice_in_double(x: Tensor) -> Tensor:
    """Sets the default dtype to float32 at the end, whatever it was before."""
    torch.set_default_dtype(torch.float64)
    factor = torch.tensor(2.0)
    torch.set_default_dtype(torch.float32)
    return x * factor.to(x.dtype)


def over_largest(x: Tensor) -> Tensor:
    return x / x.abs().amax().clamp(min=1e-6)


wrong(
    define("places_of_maxima", places_of_maxima, fake=_places),
    "values.nan",
    one,
    lambda x: x.argmax(-1),
)
wrong(
    define("sums_by_address", sums_by_address, fake=lambda x: x.new_empty(x.shape[:-1])),
    "contracts.state",
    one,
)
wrong(define("twice_in_double", twice_in_double), "contracts.process", one)
_over_largest = define("over_largest", over_largest)
# The rule divides by the largest number of the whole batch.
_over_largest.register_vmap(lambda info, dims, x: (over_largest(x), dims[0]))
wrong(_over_largest, "subsystems.vmap", one)
