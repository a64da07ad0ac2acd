"""Correct operators that only accept some arguments, or that lack a feature.

A kernel may reject some layouts. Its integers may be offsets or indices that must be in range. An
operator of `torch.library` has no forward mode. None of this is a fault.
"""

from __future__ import annotations

import itertools

import numpy as np
import torch
from torch import Tensor

from tests.testing.zoo.specimen import (
    define,
    floats_only,
    like,
    one,
    product_gradients,
    raw,
    right,
    save,
    two,
)
from tests.testing.zoo.wrong_memory import LIBRARY

# --------------------------------------------------------------------------------------------------
# Layouts


def needs_contiguous(x: Tensor) -> Tensor:
    if not x.is_contiguous() or x.dtype is torch.bool:
        raise ValueError("needs_contiguous takes contiguous tensors of numbers")
    return x * 2


right(define("needs_contiguous", needs_contiguous, fake=like), one)


def needs_rows_of_four(x: Tensor) -> Tensor:
    if x.dim() != 2 or x.shape[1] % 4 or x.stride(1) != 1 or x.dtype is torch.bool:
        raise ValueError("needs_rows_of_four takes matrices with rows of a multiple of four")
    return x + 1


right(define("needs_rows_of_four", needs_rows_of_four, fake=like), one)

# --------------------------------------------------------------------------------------------------
# Integers whose valid range depends on other arguments. If an integer is out of range, these
# kernels read memory outside of the tensor.


def rows_of_memory(x: Tensor, rows: int) -> Tensor:
    """Read rows from the tensor's memory, without checking that the tensor has so many rows."""
    memory = raw(x).flatten()[x.storage_offset() :]
    count = min(rows * x.shape[1], memory.numel()) // max(x.shape[1], 1)
    return memory[: count * x.shape[1]].view(count, x.shape[1])


def sum_of_segments(x: Tensor, offsets: Tensor) -> Tensor:
    x = x.contiguous()
    result = torch.zeros(len(offsets) - 1, x.shape[1], dtype=x.dtype)
    memory = rows_of_memory(x, int(offsets[-1]))
    for place, (start, end) in enumerate(itertools.pairwise(offsets.tolist())):
        result[place] = memory[start:end].sum(0)
    return result


right(
    define(
        "sum_of_segments",
        sum_of_segments,
        fake=lambda x, offsets: x.new_empty(offsets.shape[0] - 1, x.shape[1]),
    ),
    lambda: [(torch.randn(6, 3), torch.tensor([0, 2, 2, 6]))],
)


def mean_of_bags(x: Tensor, lengths: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(f"mean_of_bags takes floating-point tensors, got {x.dtype}")
    x = x.contiguous()
    memory = rows_of_memory(x, int(lengths.sum()))
    ends = lengths.cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    bags = [memory[a:b].sum(0) / max(b - a, 1) for a, b in zip(starts, ends, strict=True)]
    return torch.stack(bags) if bags else x.new_empty(0, x.shape[1])


right(
    define(
        "mean_of_bags",
        mean_of_bags,
        fake=lambda x, lengths: x.new_empty(lengths.shape[0], x.shape[1]),
    ),
    lambda: [(torch.randn(5, 2), torch.tensor([3, 0, 2]))],
)


def sums_of_starts(x: Tensor, lengths: Tensor) -> Tensor:
    """Sum the first `lengths[i]` elements of each row i of a padded batch."""
    floats_only("sums_of_starts", x)
    x = x.contiguous()
    memory, sums = raw(x)[x.storage_offset() :], x.new_zeros(x.shape[0])
    for row, length in enumerate(lengths.tolist()):
        sums[row] = memory[row * x.shape[1] :][:length].sum()
    return sums


right(
    define("sums_of_starts", sums_of_starts, fake=lambda x, lengths: x.new_empty(x.shape[0])),
    lambda: [(torch.arange(6.0).view(2, 3), torch.tensor([3, 2]))],
)


def rows_looked_up(table: Tensor, index: Tensor) -> Tensor:
    """Look up rows of a table, without checking that the indices are in bounds."""
    table = table.contiguous()
    memory = raw(table).flatten()[table.storage_offset() :]
    columns = table.shape[1]
    places = index.flatten()[:, None] * columns + torch.arange(columns)
    return memory[places.clamp(max=max(memory.numel() - 1, 0))].view(*index.shape, columns)


right(
    define(
        "rows_looked_up",
        rows_looked_up,
        fake=lambda table, index: table.new_empty(*index.shape, table.shape[1]),
    ),
    lambda: [
        (torch.randn(7, 3), torch.tensor([6, 0, 5])),
        # The sum of these indices is 6, so a check could mistake them for the lengths of 6 rows.
        (torch.randn(6, 3), torch.tensor([1, 3, 2])),
    ],
)


def segments_in_order(order: Tensor, lengths: Tensor, values: Tensor, total: int) -> Tensor:
    """Concatenate segments of `values` in the given order. `total` is the sum of all lengths."""
    ends = lengths.sum(1).cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    parts = [values[starts[row] : ends[row]] for row in order.tolist()]
    result = values.new_empty(total)
    found = torch.cat([values[:0], *parts])[:total]
    result[: len(found)] = found
    return result


right(
    define(
        "segments_in_order",
        segments_in_order,
        fake=lambda order, lengths, values, total: values.new_empty(total),
    ),
    lambda: [
        (
            torch.tensor([2, 0, 3, 1]),
            torch.tensor([[2, 1], [0, 3], [1, 0], [1, 1]]),
            torch.arange(9.0),
            9,
        )
    ],
)


def bins(edges: Tensor, x: Tensor) -> Tensor:
    return torch.from_numpy(np.searchsorted(edges.contiguous().numpy(), x.contiguous().numpy()))


right(
    define(
        "bins",
        bins,
        fake=lambda edges, x: torch.empty(x.shape, dtype=torch.long),
        device_types="cpu",
    ),
    lambda: [(torch.tensor([0, 10, 20, 40]), torch.tensor([5, 41, 17]))],
)

# --------------------------------------------------------------------------------------------------
# Numbers


def fourier_features(x: Tensor) -> Tensor:
    """Return sines of high frequencies, which amplify rounding errors."""
    if not x.is_floating_point():
        raise TypeError(f"fourier_features takes floating-point tensors, got {x.dtype}")
    angles = x[..., None] * (torch.pi * 2.0 ** torch.arange(8, dtype=x.dtype))
    return torch.cat([angles.sin(), angles.cos()], -1)


right(
    define("fourier_features", fourier_features, fake=lambda x: x.new_empty(*x.shape, 16)),
    one,
)


def variance(x: Tensor) -> Tensor:
    """Subtract nearly equal numbers, which makes the result inexact."""
    return (x - x.mean(-1, keepdim=True)).square().mean(-1)


right(define("variance", variance), lambda: [(torch.randn(3, 5) + 100,)])

# --------------------------------------------------------------------------------------------------
# Operators without a gradient formula, or without forward mode


@torch.library.custom_op("zoo::stock_sine", mutates_args=())
def stock_sine(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(f"stock_sine takes floating-point tensors, got {x.dtype}")
    return x.contiguous().sin()


stock_sine.register_fake(like)
stock_sine.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0].cos(), setup_context=save)
right("zoo::stock_sine", one)


@torch.library.custom_op("zoo::stock_without_formula", mutates_args=())
def stock_without_formula(x: Tensor, y: Tensor) -> Tensor:
    return x + 2 * y


stock_without_formula.register_fake(lambda x, y: torch.empty_like(x + 2 * y))
right("zoo::stock_without_formula", two)

LIBRARY.define("without_autograd(Tensor x) -> Tensor")
LIBRARY.impl("without_autograd", lambda x: torch.from_numpy(np.sign(x.contiguous().numpy())), "CPU")
torch.library.register_fake("zoo::without_autograd", like, lib=LIBRARY)
right("zoo::without_autograd", one)


def only_float32(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype is not torch.float32 or y.dtype is not torch.float32:
        raise TypeError("only_float32 takes float32 tensors")
    return x * y


_only_float32 = define("only_float32", only_float32)
_only_float32.register_autograd(product_gradients, setup_context=save)
right(_only_float32, two)

# --------------------------------------------------------------------------------------------------
# Indices, integers and random numbers. If a check changes them, they may become invalid


def put_rows(cache: Tensor, rows: Tensor, places: Tensor) -> None:
    cache.index_copy_(0, places, rows)


right(
    define("put_rows", put_rows, mutates_args={"cache"}),
    lambda: [(torch.zeros(6, 3), torch.randn(2, 3), torch.tensor([1, 4]))],
)


def halved(x: Tensor) -> Tensor:
    return x / 2


right(define("halved", halved), lambda: [(torch.arange(6).view(2, 3),)])


def dropped(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape, device=x.device) > 0.5)


right(define("dropped", dropped, tags=torch.Tag.nondeterministic_seeded), one)


def with_noise(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    noise = torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generator)
    return x.contiguous() + noise


right(
    define(
        "with_noise",
        with_noise,
        fake=like,
        schema="(Tensor x, Generator? generator=None) -> Tensor",
        tags=torch.Tag.nondeterministic_seeded,
    ),
    lambda: [(one()[0], {"generator": torch.Generator().manual_seed(3)})],
)

# --------------------------------------------------------------------------------------------------
# Results with unknown sizes


def only_positive(x: Tensor) -> Tensor:
    if x.dtype is torch.bool:
        raise TypeError("only_positive takes numbers")
    return x.relu().to_sparse()


right(define("only_positive", only_positive), one)
_nonzeros = define("nonzeros", lambda x: x.to_sparse(), schema="(Tensor x) -> Tensor")
_nonzeros.register_autograd(lambda ctx, g: g.to_dense())
right(_nonzeros, one)
