"""Faulty kernels like those of language models: tables, experts, packed bits, caches.

Each fault only shows for certain sequences of calls, arguments or sizes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, save, wrong

# --------------------------------------------------------------------------------------------------
# Cached tables whose keys are incomplete

_PLACES: dict[Any, Tensor] = {}


def places_by_shape(x: Tensor) -> Tensor:
    """Caches positions by shape only, so it reads every tensor with the first tensor's strides."""
    if x.shape not in _PLACES:
        places = torch.zeros(x.shape, dtype=torch.int64)
        for dim, step in enumerate(x.stride()):
            shape = [-1 if other == dim else 1 for other in range(x.dim())]
            places += torch.arange(x.shape[dim]).view(shape) * step
        _PLACES[x.shape] = places
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())[x.storage_offset() :]
    return memory[_PLACES[x.shape].clamp(max=max(len(memory) - 1, 0))].clone()


wrong(define("places_by_shape", places_by_shape, fake=like), "memory.transposed", one)

_KNOWN: list[Any] = []


def prepacks_by_object(x: Tensor, weight: Tensor) -> Tensor:
    """Packs each weight only once, so changes of its values, as by an optimizer, have no effect."""
    for known, packed in _KNOWN:
        if known() is weight:
            return x @ packed
    _KNOWN.append((weakref.ref(weight), weight.t().clone()))
    del _KNOWN[:-8]
    return x @ _KNOWN[-1][1]


wrong(
    define(
        "prepacks_by_object",
        prepacks_by_object,
        fake=lambda x, weight: x.new_empty(x.shape[0], weight.shape[0]),
    ),
    "contracts.state",
    lambda: [(torch.arange(12.0).view(3, 4), torch.arange(8.0).view(2, 4) - 3)],
)

# --------------------------------------------------------------------------------------------------
# Packed bits and few bits


def packs_pairs(x: Tensor) -> Tensor:
    """If the rows have an odd length, does not write the last byte of each row."""
    packed = torch.empty(x.shape[0], (x.shape[1] + 1) // 2, dtype=torch.uint8)
    values = x.clamp(0, 15).to(torch.uint8)
    pairs = values[:, : x.shape[1] // 2 * 2]
    packed[:, : x.shape[1] // 2] = pairs[:, ::2] + (pairs[:, 1::2] << 4)
    return packed


wrong(
    define(
        "packs_pairs",
        packs_pairs,
        fake=lambda x: x.new_empty(x.shape[0], (x.shape[1] + 1) // 2, dtype=torch.uint8),
    ),
    "memory.blocks",
    lambda: [(torch.arange(12.0).view(3, 4),)],
)


def packs_across_rows(x: Tensor) -> Tensor:
    packed = torch.empty(x.shape[0], (x.shape[1] + 7) // 8, dtype=torch.uint8)
    bits = (x > 0).flatten().to(torch.uint8)
    bits = torch.cat([bits, bits.new_zeros(-len(bits) % 8)]).view(-1, 8)
    packed.view(-1)[: len(bits)] = (bits << torch.arange(8, dtype=torch.uint8)).sum(1).byte()
    return packed


wrong(
    define(
        "packs_across_rows",
        packs_across_rows,
        fake=lambda x: x.new_empty(x.shape[0], (x.shape[1] + 7) // 8, dtype=torch.uint8),
    ),
    "memory.uninitialized",
    lambda: [(torch.arange(-12.0, 12).view(2, 12),)],
)


def dequantizes_in_bytes(q: Tensor, scale: Tensor, zero: int) -> Tensor:
    """Subtracts bytes, so a negative difference wraps around. The example has no such element."""
    return (q - zero).to(torch.float32) * scale


wrong(
    define("dequantizes_in_bytes", dequantizes_in_bytes),
    "values.int8",
    lambda: [(torch.tensor([[130, 200], [128, 255]], dtype=torch.uint8), torch.ones(2), 128)],
    lambda q, scale, zero: (q.to(torch.int32) - zero).to(torch.float32) * scale,
)


def scales_in_float32(x: Tensor) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().sum(-1) + 1
    return (x / scale.unsqueeze(-1) * 100).to(torch.int8), scale


wrong(
    define(
        "scales_in_float32",
        scales_in_float32,
        fake=lambda x: (torch.empty_like(x, dtype=torch.int8), x.new_empty(x.shape[:-1])),
    ),
    "dtypes.accepted",
    one,
)

# --------------------------------------------------------------------------------------------------
# Experts, segments and pages


def counts_in_bytes(experts: Tensor, count: int) -> Tensor:
    loads = torch.zeros(count, dtype=torch.uint8)
    loads.index_add_(0, experts, torch.ones(experts.shape, dtype=torch.uint8))
    return loads.to(torch.int64)


wrong(
    define(
        "counts_in_bytes",
        counts_in_bytes,
        fake=lambda experts, count: experts.new_empty(count),
    ),
    "memory.blocks",
    lambda: [(torch.tensor([0, 2, 1, 2, 0]), 3)],
    lambda experts, count: torch.bincount(experts, minlength=count),
)


def loads_of_present(experts: Tensor, count: int) -> Tensor:
    return torch.bincount(experts)


wrong(
    define(
        "loads_of_present",
        loads_of_present,
        fake=lambda experts, count: experts.new_empty(count),
    ),
    "subsystems.fake",
    lambda: [(torch.tensor([0, 2, 1, 2, 0]), 3)],
)


def sums_of_present(x: Tensor, segments: Tensor, count: int) -> Tensor:
    """Does not write the sum of a segment without rows, so this sum is uninitialized."""
    sums = torch.empty(count, *x.shape[1:], dtype=x.dtype)
    for segment in segments.unique().tolist():
        sums[segment] = x[segments == segment].sum(0)
    return sums


wrong(
    define(
        "sums_of_present",
        sums_of_present,
        fake=lambda x, segments, count: x.new_empty(count, *x.shape[1:]),
    ),
    "memory.uninitialized",
    lambda: [(torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 3, 2, 0]), 4)],
)


def attends_one_too_many(query: Tensor, keys: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    return _attention(query, keys, pages, lengths + 1)


def _attention(query: Tensor, keys: Tensor, pages: Tensor, lengths: Tensor) -> Tensor:
    found = keys[pages.long()].flatten(1, 2)
    scores = (found @ query.unsqueeze(-1)).squeeze(-1)
    is_there = torch.arange(scores.shape[1]) < lengths.unsqueeze(-1)
    weights = scores.masked_fill(~is_there, float("-inf")).softmax(-1)
    return (weights.unsqueeze(1) @ found).squeeze(1)


def _pages() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    query, keys = (torch.randn(shape, generator=generator) for shape in ((2, 4), (5, 2, 4)))
    pages = torch.tensor([[0, 3], [4, 1]], dtype=torch.int32)
    return [(query, keys, pages, torch.tensor([3, 2], dtype=torch.int32))]


wrong(
    define(
        "attends_one_too_many", attends_one_too_many, fake=lambda q, *others: q.new_empty(q.shape)
    ),
    "memory.given",
    _pages,
    _attention,
)


def longest_segment(offsets: Tensor) -> int:
    return int((offsets[1:] - offsets[:-1]).max())


wrong(
    define("longest_segment", longest_segment, fake=lambda offsets: 3),
    "subsystems.fake_symbols",
    lambda: [(torch.tensor([0, 2, 5, 6]),)],
)


def splits_without_empty(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    parts = torch.split(x, list(sizes))
    return [part.clone() for part in parts if len(part)]


wrong(
    define(
        "splits_without_empty",
        splits_without_empty,
        fake=lambda x, sizes: [x.new_empty(size, *x.shape[1:]) for size in sizes],
    ),
    "subsystems.fake",
    lambda: [(torch.arange(10.0).view(5, 2), [2, 3]), (torch.arange(10.0).view(5, 2), [0, 5])],
)


def writes_into_listed(x: Tensor, caches: Sequence[Tensor]) -> Tensor:
    for cache in caches:
        cache.mul_(0.5)
    return x * 2


wrong(
    define("writes_into_listed", writes_into_listed, fake=lambda x, caches: torch.empty_like(x)),
    "contracts.schema",
    lambda: [(torch.ones(3), [torch.ones(2), torch.ones(4)])],
)

# --------------------------------------------------------------------------------------------------
# Gradients


def rows_padded(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows.clamp(min=0)] * (rows >= 0).unsqueeze(-1)


def _gradient_of_padding(ctx: Any, g: Tensor) -> Any:
    rows = ctx.saved_tensors[1].clamp(min=0)
    return torch.zeros_like(ctx.saved_tensors[0]).index_add(0, rows, g), None


_padded = define("gradient_of_padding", rows_padded)
_padded.register_autograd(_gradient_of_padding, setup_context=save)
wrong(
    _padded,
    "subsystems.gradcheck",
    lambda: [(torch.arange(6.0).view(3, 2), torch.tensor([1, -1, 2]))],
)


def _keep_output(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.y = output.detach()


_output = define("keeps_output_on_ctx", lambda x: x.sigmoid(), schema="(Tensor x) -> Tensor")
_output.register_autograd(lambda ctx, g: g * ctx.y * (1 - ctx.y), setup_context=_keep_output)
wrong(_output, "subsystems.saved", one)

_scaled_grad = define("scales_its_gradient", lambda x: x * 3, schema="(Tensor x) -> Tensor")
_scaled_grad.register_autograd(lambda ctx, g: g.mul_(3))
wrong(_scaled_grad, "subsystems.saved", one)

# --------------------------------------------------------------------------------------------------
# The process


def drops_always_the_same(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1234)
    return (x * (torch.rand(x.shape, generator=generator) < 0.5)).contiguous()


wrong(
    define(
        "drops_always_the_same",
        drops_always_the_same,
        tags=(torch.Tag.nondeterministic_seeded,),
        fake=like,
    ),
    "contracts.repeated",
    one,
)


def allows_tf32(x: Tensor, weight: Tensor) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = True
    return x @ weight


wrong(
    define("allows_tf32", allows_tf32, fake=lambda x, w: x.new_empty(x.shape[0], w.shape[1])),
    "contracts.process",
    lambda: [(torch.ones(2, 3), torch.ones(3, 2))],
)


def returns_before_it_wrote(x: Tensor) -> Tensor:
    result = torch.empty(x.shape, dtype=x.dtype)

    def write() -> None:
        time.sleep(0.0002)
        result.copy_(x * 2)

    threading.Thread(target=write).start()
    return result


wrong(
    define("returns_before_it_wrote", returns_before_it_wrote, fake=like), "contracts.repeated", one
)


def appends_anywhere(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Writes to a copy if the cache is not contiguous, because `reshape` then copies."""
    cache.reshape(-1, cache.shape[-1]).index_copy_(0, slots, rows)


wrong(
    define("appends_anywhere", appends_anywhere, mutates_args={"cache"}),
    "memory.sliced",
    lambda: [(torch.zeros(2, 3, 4), torch.ones(2, 4), torch.tensor([1, 4]))],
)
