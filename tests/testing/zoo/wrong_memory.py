"""Faulty operators that mishandle memory, dtypes, values, or arguments that share memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import (
    define,
    image,
    like,
    one,
    positive,
    raw,
    two,
    wrong,
)

# --------------------------------------------------------------------------------------------------
# Memory


def assumes_contiguous(x: Tensor) -> Tensor:
    return raw(x)[: x.numel()].reshape(x.shape).clone()


wrong(define("assumes_contiguous", assumes_contiguous, fake=like), "memory.transposed", one)


def assumes_dense(x: Tensor) -> Tensor:
    if x.t().is_contiguous():  # handles a transpose, but no other strides
        return x.contiguous() if not x.is_contiguous() else x.clone()
    start = x.storage_offset()
    return raw(x)[start : start + x.numel()].reshape(x.shape).clone()


wrong(define("assumes_dense", assumes_dense, fake=like), "memory.gaps", one)


def ignores_offset(x: Tensor) -> Tensor:
    return raw(x).as_strided(x.shape, x.stride(), 0).clone()


wrong(define("ignores_offset", ignores_offset, fake=like), "memory.offset", one)


def reads_row_before(x: Tensor) -> Tensor:
    """Reads the element before the first one, unless the tensor is at the start of its storage."""
    start = x.storage_offset() - 1
    return x + (raw(x)[start] if start >= 0 else 0)


wrong(define("reads_row_before", reads_row_before, fake=like), "memory.sliced", one)


def reads_past_end(x: Tensor) -> Tensor:
    return raw(x)[x.storage_offset() :][: x.numel() + 1].sum()


wrong(
    define("reads_past_end", reads_past_end, fake=lambda x: x.new_empty(())),
    "memory.contiguous",
    one,
)


def writes_past_end(x: Tensor) -> None:
    raw(x)[x.storage_offset() :][: x.numel() + 1].add_(1)


wrong(define("writes_past_end", writes_past_end, mutates_args={"x"}), "memory.contiguous", one)


def writes_gaps(x: Tensor) -> None:
    if not x.is_contiguous() and x.dim() == 2 and x.numel():
        end = x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + (x.shape[1] - 1) * x.stride(1)
        raw(x)[x.storage_offset() : end + 1].mul_(2)
    else:
        x.mul_(2)


wrong(define("writes_gaps", writes_gaps, mutates_args={"x"}), "memory.gaps", one)


def wrong_for_channels_last(x: Tensor) -> Tensor:
    if not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
        return raw(x)[: x.numel()].reshape(x.shape).relu()
    return x.relu().contiguous()


wrong(
    define("wrong_for_channels_last", wrong_for_channels_last, fake=like),
    "memory.channels_last",
    image,
)

LIBRARY = torchop.Library("zoo", "FRAGMENT")


def _low_level(name: str, kernel: object, key: str) -> str:
    """Define an operator that ignores the negative or the conjugate bit of its argument."""
    LIBRARY.define(f"{name}(Tensor x) -> Tensor")
    LIBRARY.impl(name, kernel, "CPU")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, key)
    torch.library.register_fake(f"zoo::{name}", like, lib=LIBRARY)
    return f"zoo::{name}"


def _values_in_memory(x: Tensor) -> Tensor:
    return raw(x).as_strided(x.shape, x.stride(), x.storage_offset()).clone()


wrong(_low_level("ignores_negative", _values_in_memory, "Negative"), "memory.negative", one)
wrong(
    _low_level("ignores_conjugate", _values_in_memory, "Conjugate"),
    "memory.conjugate",
    lambda: [(torch.tensor([1 + 2j, 3 - 1j]),)],
)


def sums_distinct(x: Tensor) -> Tensor:
    """Adds elements that share memory only once, so the sum of an expanded tensor is incorrect."""
    seen = {}
    for index in np.ndindex(*x.shape):
        place = sum(i * s for i, s in zip(index, x.stride(), strict=True))
        seen[place] = x[index]
    return torch.stack([*seen.values(), x.new_zeros(())]).sum()


wrong(
    define("sums_distinct", sums_distinct, fake=lambda x: x.new_empty(())), "memory.expanded", one
)


def divides_by_leading_dimension(x: Tensor) -> Tensor:
    width = x.stride(0) if x.shape[0] == 1 else max(x.shape[1], 1)
    return x.sum(1) / width


wrong(
    define(
        "divides_by_leading_dimension",
        divides_by_leading_dimension,
        fake=lambda x: x.new_empty(x.shape[0]),
    ),
    "memory.odd_strides",
    one,
)


def starts_with_first_element(x: Tensor) -> Tensor:
    """Reads the first element even if the tensor is empty, which is out of bounds."""
    best = raw(x)[x.storage_offset()]
    return torch.stack([best, *x.flatten()]).amax()


wrong(
    define("starts_with_first_element", starts_with_first_element, fake=lambda x: x.new_empty(())),
    "memory.empty",
    one,
)


def reads_two_at_once(x: Tensor) -> Tensor:
    """Reads two elements even if there is only one, like a vectorized loop."""
    start = x.storage_offset()
    if x.numel() == 1 and len(raw(x)) > start + 1:
        return (x + x + 0 * raw(x)[start + 1]).contiguous()
    return (x + x).contiguous()


wrong(define("reads_two_at_once", reads_two_at_once, fake=like), "memory.single", one)


def adds_columns(x: Tensor) -> Tensor:
    """Returns uninitialized memory if there are no columns."""
    total = torch.empty(x.shape[:1], dtype=x.dtype)
    for number, column in enumerate(x.unbind(1)):
        total.copy_(column if number == 0 else total + column)
    return total


wrong(
    define("adds_columns", adds_columns, fake=lambda x: x.new_empty(x.shape[:1])),
    "memory.empty",
    one,
)


def sums_in_steps(x: Tensor) -> Tensor:
    """Computes a cumulative sum in two buffers, and writes nothing if there is only one element."""
    width, source, target = 1, x.clone(), torch.empty(x.shape, dtype=x.dtype)
    while width < len(x):
        target[:width] = source[:width]
        target[width:] = source[width:] + source[:-width]
        source.copy_(target)
        width *= 2
    return target


wrong(
    define("sums_in_steps", sums_in_steps, fake=like),
    "memory.single",
    lambda: [(torch.arange(1.0, 7),)],
)


def wrong_for_scalars(x: Tensor) -> Tensor:
    return raw(x)[0].clone() if x.dim() == 0 else x.clone().contiguous()


wrong(define("wrong_for_scalars", wrong_for_scalars, fake=like), "memory.zero_dim", one)


def assumes_alignment(x: Tensor) -> Tensor:
    """Rounds the storage offset down to a multiple of four, as if memory were always aligned."""
    start = x.storage_offset() // 4 * 4
    return raw(x).as_strided(x.shape, x.stride(), start).clone().contiguous()


wrong(define("assumes_alignment", assumes_alignment, fake=like), "memory.sliced", one)


def heeds_only_first(x: Tensor, y: Tensor) -> Tensor:
    """Ignores the strides of `y` if `x` is contiguous."""
    if x.is_contiguous() and not y.is_contiguous():
        y = raw(y)[y.storage_offset() :][: y.numel()].reshape(y.shape)
    return (x + y).contiguous()


wrong(define("heeds_only_first", heeds_only_first, fake=like), "memory.transposed", two)


def counts_into(x: Tensor) -> None:
    """Writes different numbers to elements that share memory, so only the last one remains."""
    numbers = torch.arange(x.numel(), dtype=x.dtype).reshape(x.shape)
    for index in np.ndindex(*x.shape):
        x[index] = numbers[index]


# Unlike torchop.custom_op, LIBRARY does not reject expanded arguments before the kernel runs.
LIBRARY.define("counts_into(Tensor(a!) x) -> ()")
LIBRARY.impl("counts_into", counts_into, "CPU")
wrong("zoo::counts_into", "memory.written_expanded", one)


def leaves_last(x: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype)
    result.view(-1)[:-1] = x.reshape(-1)[:-1]
    return result


wrong(define("leaves_last", leaves_last, fake=like), "memory.uninitialized", one)


def off_by_one(x: Tensor) -> Tensor:
    return x.cumsum(-1).roll(1, -1)


wrong(
    define("off_by_one", off_by_one, fake=like),
    "memory.given",
    one,
    lambda x: x.cumsum(-1),
)


# --------------------------------------------------------------------------------------------------
# Dtypes


def computes_in_float32(x: Tensor) -> Tensor:
    return x.float().exp().to(x.dtype)


wrong(define("computes_in_float32", computes_in_float32), "dtypes.double", one)


def truncates_half(x: Tensor) -> Tensor:
    return x.to(torch.int32).to(x.dtype) if x.dtype is torch.half else x.clone()


wrong(define("truncates_half", truncates_half), "dtypes.numbers", one)


def overflows_half(x: Tensor) -> Tensor:
    return x * 300 * 300 / 90000


wrong(define("overflows_half", overflows_half), "dtypes.numbers", lambda: [(torch.ones(3),)])


def widens(x: Tensor) -> Tensor:
    return x.sum(0, dtype=torch.float)


wrong(define("widens", widens, fake=lambda x: x.new_empty(x.shape[1:])), "dtypes.accepted", one)


def _only_float(x: Tensor) -> Tensor:
    assert x.dtype is torch.float, "only float32"
    return torch.empty_like(x)


wrong(
    define("fakes_float_only", lambda x: x.sin(), schema="(Tensor x) -> Tensor", fake=_only_float),
    "dtypes.accepted",
    one,
)


def promotes(x: Tensor, y: Tensor) -> Tensor:
    return x + y


wrong(define("promotes", promotes, fake=lambda x, y: torch.empty_like(x)), "dtypes.promotion", two)


# --------------------------------------------------------------------------------------------------
# Values


def drops_nan(x: Tensor) -> Tensor:
    return x.nan_to_num(0.0) if x.is_contiguous() else x.contiguous() + 0


wrong(define("drops_nan", drops_nan, fake=like), "values.nan", one)


def clamps_inf(x: Tensor) -> Tensor:
    return x.clamp(-1e6, 1e6) if x.is_contiguous() else x.contiguous() + 0


wrong(define("clamps_inf", clamps_inf, fake=like), "values.inf", one)


def loses_sign_of_zero(x: Tensor) -> Tensor:
    return 1 / (x.contiguous() + 0.0 if x.is_contiguous() else x.contiguous())


wrong(define("loses_sign_of_zero", loses_sign_of_zero, fake=like), "values.zeros", positive)


def flushes_denormals(x: Tensor) -> Tensor:
    tiny = torch.finfo(x.dtype).tiny
    kept = x.contiguous() if x.is_contiguous() else torch.where(x.abs() < tiny, 0, x).contiguous()
    return kept / tiny


wrong(define("flushes_denormals", flushes_denormals, fake=like), "values.denormals", one)


def overflows(x: Tensor) -> Tensor:
    return x * 2 / 2 if x.is_contiguous() else x.contiguous() + 0


wrong(define("overflows", overflows, fake=like), "values.extremes", one)


def forgets_nan(x: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(np.fmax.reduce(x.numpy(), axis=-1))).clone()


wrong(
    define("forgets_nan", forgets_nan, fake=lambda x: x.new_empty(x.shape[:-1])),
    "values.nan",
    one,
    lambda x: x.amax(-1),
)


# --------------------------------------------------------------------------------------------------
# Shared memory


def sees_one_tensor(x: Tensor, y: Tensor) -> Tensor:
    if x.data_ptr() == y.data_ptr() and x.numel():
        return x * x
    return x + y


wrong(define("sees_one_tensor", sees_one_tensor, fake=like), "sharing.one", two)


def changes_and_restores(x: Tensor, y: Tensor) -> Tensor:
    """Doubles an argument in place through NumPy, and halves it again before it returns."""
    scaled = x.numpy()
    scaled *= 2
    result = x + y
    scaled /= 2
    return result.contiguous()


wrong(define("changes_and_restores", changes_and_restores, fake=like), "sharing.one", two)


def expects_no_overlap(x: Tensor, y: Tensor) -> Tensor:
    """Doubles `x` in place before it reads `y`, so the result is incorrect if they share memory."""
    if x.data_ptr() == y.data_ptr():
        return (x + y).contiguous()
    scaled = x.numpy()
    scaled *= 2
    result = x / 2 + y
    scaled /= 2
    return result.contiguous()


wrong(define("expects_no_overlap", expects_no_overlap, fake=like), "sharing.overlap", two)


def writes_between(x: Tensor, y: Tensor) -> None:
    if x.is_contiguous() or not x.numel():
        x.add_(y)
        return
    x.add_(y)
    end = x.storage_offset() + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    raw(x)[x.storage_offset() + 1 : end : 2] = 0


wrong(define("writes_between", writes_between, mutates_args={"x"}), "memory.gaps", two)


def reverses_into(x: Tensor, y: Tensor) -> None:
    """If the arguments share memory, overwrites elements before it reads them."""
    target, source = x.view(-1) if x.is_contiguous() else None, y.reshape(-1)
    values = source if y.is_contiguous() else source.clone()
    if target is None:
        x.copy_(values.flip(0).reshape(x.shape))
        return
    for index in range(len(target)):
        target[index] = values[len(target) - 1 - index]


wrong(define("reverses_into", reverses_into, mutates_args={"x"}), "sharing.written", two)
