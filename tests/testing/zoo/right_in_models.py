"""Correct kernels like those of language models: experts, pages, packed bits, tables."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, right, save

# --------------------------------------------------------------------------------------------------
# Integer arguments that depend on each other


def cells(x: Tensor, starts: Tensor, counts: Tensor, places: Tensor) -> Tensor:
    """Sum the rows of each cell, without checking that `starts` and `counts` are in bounds.

    If they are out of bounds, the result is random, as if the kernel read other memory.
    """
    sums = torch.zeros(len(starts), *x.shape[1:], dtype=x.dtype)
    for cell, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=False)):
        for number in range(start, start + count):
            if 0 <= number < len(places) and 0 <= int(places[number]) < len(x):
                sums[cell] += x[places[number]]
            else:
                sums[cell] = torch.empty(1).uniform_(generator=_elsewhere)
    return sums


_elsewhere = torch.Generator().manual_seed(0)
right(
    define(
        "cells", cells, fake=lambda x, starts, *others: x.new_empty(starts.shape[0], *x.shape[1:])
    ),
    lambda: [
        (
            torch.arange(14.0).view(7, 2),
            torch.tensor([0, 1, 4]),
            torch.tensor([1, 3, 2]),
            torch.tensor([3, 0, 2, 4, 1, 6]),
        )
    ],
)


def routed(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    values, experts = logits.float().softmax(-1).topk(count, -1)
    return values / values.sum(-1, keepdim=True), experts


right(
    define("routed", routed, fake=lambda logits, count: routed(logits, count)),
    lambda: [(torch.tensor([[0.5, -1, 2, 0.25], [1, 3, -2, 0], [0, -1, 1.5, 4]]), 2)],
)


def mixed_experts(x: Tensor, weights: Tensor, experts: Tensor, share: Tensor) -> Tensor:
    each = torch.einsum("ti,teio->teo", x, weights[experts])
    return (each * share.unsqueeze(-1)).sum(1).to(x.dtype)


right(
    define("mixed_experts", mixed_experts),
    lambda: [
        (
            torch.arange(6.0).view(3, 2) / 8,
            torch.arange(16.0).view(4, 2, 2) / 16,
            torch.tensor([[0, 3], [1, 2], [3, 1]]),
            torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]]),
        )
    ],
)


def grouped_product(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix. `ends` contains the end of each group."""
    result = torch.zeros(x.shape[0], weights.shape[-1], dtype=x.dtype)
    start = 0
    for number, end in enumerate(ends.tolist()):
        result[start:end] = x[start:end] @ weights[number]
        start = end
    return result


right(
    define(
        "grouped_product",
        grouped_product,
        fake=lambda x, weights, ends: x.new_empty(x.shape[0], weights.shape[-1]),
    ),
    lambda: [
        (
            torch.arange(10.0).view(5, 2) / 8,
            torch.arange(12.0).view(3, 2, 2) / 8,
            torch.tensor([1, 3, 5], dtype=torch.int32),
        )
    ],
)


def paged_attention(query: Tensor, keys: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    found = keys[pages.long()].flatten(1, 2)
    scores = (found @ query.unsqueeze(-1)).squeeze(-1)
    is_there = torch.arange(scores.shape[1], dtype=lengths.dtype) < lengths.unsqueeze(-1)
    weights = scores.masked_fill(~is_there, float("-inf")).softmax(-1)
    # Set the elements after the end of a sequence to 0, because 0 times NaN would be NaN.
    found = found.masked_fill(~is_there.unsqueeze(-1), 0)
    return (weights.unsqueeze(1) @ found).squeeze(1).to(query.dtype)


right(
    define("paged_attention", paged_attention, fake=lambda query, *others: like(query)),
    lambda: [
        (
            torch.arange(8.0).view(2, 4) / 8,
            torch.arange(40.0).view(5, 2, 4) / 40,
            torch.tensor([[0, 3], [4, 1]], dtype=torch.int32),
            torch.tensor([3, 2], dtype=torch.int32),
        )
    ],
)


def append_pages(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Write rows into the slots of a cache. Rows with the slot -1 are padding, and are skipped."""
    for row, slot in zip(rows, slots.tolist(), strict=False):
        if slot >= 0:
            cache[slot // cache.shape[1], slot % cache.shape[1]] = row


right(
    define("append_pages", append_pages, mutates_args={"cache"}, fake=lambda *args: None),
    lambda: [(torch.zeros(2, 3, 4), torch.ones(3, 4), torch.tensor([1, -1, 4]))],
)


def largest_of_segments(x: Tensor, segments: Tensor, count: int) -> Tensor:
    """Return the maximum of each segment, which is minus infinity for a segment without rows."""
    largest = torch.full((count, *x.shape[1:]), float("-inf"), dtype=x.dtype)
    places = segments.view(-1, *[1] * (x.dim() - 1)).expand_as(x)
    return largest.scatter_reduce(0, places, x, "amax")


right(
    define(
        "largest_of_segments",
        largest_of_segments,
        fake=lambda x, segments, count: x.new_empty(count, *x.shape[1:]),
    ),
    lambda: [(torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 1, 2, 0]), 4)],
)

# --------------------------------------------------------------------------------------------------
# Packed bits and few bits


def pack_pairs(x: Tensor) -> Tensor:
    """Pack pairs of 4-bit numbers into bytes. If the length of a row is odd, a zero is appended."""
    values = torch.nn.functional.pad(x.clamp(0, 15).to(torch.uint8), (0, x.shape[1] % 2))
    return values[:, ::2] + (values[:, 1::2] << 4)


right(
    define(
        "pack_pairs",
        pack_pairs,
        fake=lambda x: x.new_empty(x.shape[0], (x.shape[1] + 1) // 2, dtype=torch.uint8),
    ),
    lambda: [(torch.arange(9, dtype=torch.int32).view(3, 3),)],
)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    if count < 0:
        raise ValueError(f"unpack_bits takes a count of 0 or more, got {count}")
    bits = (packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2)[..., :count].bool()


right(
    define(
        "unpack_bits",
        unpack_bits,
        fake=lambda packed, count: torch.empty_like(unpack_bits(packed, count)),
    ),
    lambda: [(torch.tensor([[1, 255], [7, 128]], dtype=torch.uint8), 11)],
)


def dequantize(q: Tensor, scale: Tensor, zero: int) -> Tensor:
    if q.is_floating_point() or not scale.is_floating_point():
        raise TypeError("dequantize takes integers and floating-point scales")
    if not -128 <= zero <= 255:
        raise ValueError(f"the zero point has eight bits, got {zero}")
    return (q.to(torch.int32) - zero).to(scale.dtype) * scale


right(
    define("dequantize", dequantize),
    lambda: [(torch.tensor([[130, 20], [128, 255]], dtype=torch.uint8), torch.ones(2) / 8, 128)],
)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


right(
    define("quantize_rows", quantize_rows),
    lambda: [(torch.tensor([[0.5, -1.0, 2.0], [4.0, 0.25, -0.125]]),)],
)


def to_float8(x: Tensor, scale: float) -> Tensor:
    return (x.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn)


right(
    define(
        "to_float8",
        to_float8,
        fake=lambda x, scale: torch.empty_like(x, dtype=torch.float8_e4m3fn),
    ),
    lambda: [(torch.tensor([[0.5, -1.0, 2.0], [4.0, 0.25, -0.125]]), 2.0)],
)

# --------------------------------------------------------------------------------------------------
# Cached tables and threads

_ANGLES: dict[Any, Tensor] = {}


def rotated(x: Tensor, base: float) -> Tensor:
    """Caches a table of angles. The key contains everything on which the table depends."""
    key = *x.shape, x.dtype, base
    if key not in _ANGLES:
        speeds = base ** -torch.linspace(0, 1, x.shape[-1], dtype=torch.double)
        rows = torch.arange(x.shape[0], dtype=torch.double).view(-1, *[1] * (x.dim() - 1))
        _ANGLES[key] = (rows * speeds).cos()
    return (x * _ANGLES[key]).to(x.dtype).contiguous()


right(
    define("rotated", rotated, fake=like),
    lambda: [(torch.arange(12.0).view(3, 4) + 1, 100.0)],
)

_WORKERS: list[ThreadPoolExecutor] = []


def doubled_by_workers(x: Tensor) -> Tensor:
    """Starts threads in the first call, and reuses them, so they are not a leak."""
    if not _WORKERS:
        _WORKERS.append(ThreadPoolExecutor(2))
    halves = _WORKERS[0].map(lambda part: part + part, x.contiguous().flatten().chunk(2))
    return torch.cat(list(halves)).view(x.shape)


right(define("doubled_by_workers", doubled_by_workers, fake=like), one)


def dropped_with_mask(x: Tensor, share: float) -> tuple[Tensor, Tensor]:
    mask = torch.rand(x.shape, dtype=torch.float32) >= share
    return (x * mask / (1 - share)).to(x.dtype).contiguous(), mask


_dropped = define(
    "dropped_with_mask",
    dropped_with_mask,
    tags=(torch.Tag.nondeterministic_seeded,),
    fake=lambda x, share: (like(x), x.new_empty(x.shape, dtype=torch.bool)),
)
_dropped.register_autograd(
    lambda ctx, g, _: (g * ctx.saved_tensors[0] / (1 - ctx.share), None),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(output[1]),
        setattr(ctx, "share", inputs[1]),
    )[0],
)
right(_dropped, lambda: [(torch.ones(3, 4), 0.25)])


def norm_added(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    """Add `x` to `residual` in place, and write the normalized sum to `x`."""
    total = x + residual
    exact = total.to(torch.promote_types(total.dtype, torch.float32))
    scale = (exact.square().mean(-1, keepdim=True) + eps).rsqrt()
    normed = (exact * scale * weight).to(x.dtype)
    residual.copy_(total)
    x.copy_(normed)


right(
    define("norm_added", norm_added, mutates_args={"x", "residual"}),
    lambda: [(torch.arange(6.0).view(2, 3), torch.ones(2, 3), torch.tensor([1.0, 2, 3]), 1e-5)],
)


def gathered(table: Tensor, rows: Tensor) -> Tensor:
    """Select rows of a table. If an index repeats, the gradients of its row are added."""
    return table.index_select(0, rows)


_gathered = define("gathered", gathered)
_gathered.register_autograd(
    lambda ctx, g: (
        torch.zeros_like(ctx.saved_tensors[0]).index_add(0, ctx.saved_tensors[1], g),
        None,
    ),
    setup_context=save,
)
right(_gathered, lambda: [(torch.arange(6.0).view(3, 2), torch.tensor([1, 0, 2]))])
