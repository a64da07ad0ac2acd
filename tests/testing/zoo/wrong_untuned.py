"""Faulty kernels that were written without running the checks.

Each is registered with the check that is expected to report it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, like, one, save, wrong

# --------------------------------------------------------------------------------------------------
# Quantisation


def quantizes_whole_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Does not write the columns after the last whole group."""
    count = x.shape[1] // group
    codes = torch.empty(x.shape, dtype=torch.int8)
    whole = x[:, : count * group].unflatten(1, (count, group))
    scale = whole.float().abs().amax(-1).clamp(min=1e-6) / 127
    rounded = (whole.float() / scale.unsqueeze(-1)).round().to(torch.int8)
    codes[:, : count * group] = rounded.flatten(1)
    return codes, scale


wrong(
    define(
        "quantizes_whole_groups",
        quantizes_whole_groups,
        fake=lambda x, group: (
            x.new_empty(x.shape, dtype=torch.int8),
            x.new_empty(x.shape[0], x.shape[1] // group, dtype=torch.float32),
        ),
    ),
    "memory.blocks",
    lambda: [(torch.arange(-8.0, 8).view(2, 8), 4)],
)


def scales_without_least(x: Tensor) -> Tensor:
    """Divides each row by its maximum, which is 0 for a row of zeros."""
    return x / x.abs().amax(-1, keepdim=True)


wrong(
    define("scales_without_least", scales_without_least),
    "values.zeros",
    one,
    lambda x: x / x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny),
)


def averages_bytes(x: Tensor, y: Tensor) -> Tensor:
    return (x + y) // 2


wrong(
    define("averages_bytes", averages_bytes),
    "values.int8",
    lambda: [
        (
            torch.tensor([[10, 20], [30, 41]], dtype=torch.uint8),
            torch.tensor([[100, 2], [3, 4]], dtype=torch.uint8),
        )
    ],
    lambda x, y: ((x.int() + y.int()) // 2).to(x.dtype),
)

# --------------------------------------------------------------------------------------------------
# Attention and routing


def _softmax_times(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (query @ keys.mT).softmax(-1) @ values


def keeps_first_maximum(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Computes attention in blocks, but does not rescale the sum if a later score is larger."""
    total = torch.zeros(query.shape[0], 1, dtype=query.dtype)
    result = torch.zeros(query.shape[0], values.shape[1], dtype=query.dtype)
    for start in range(0, keys.shape[0], 64):
        scores = query @ keys[start : start + 64].mT
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total += weights.sum(-1, keepdim=True)
        result += weights @ values[start : start + 64]
    return result / total


def _queries() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(shape, generator=generator) for shape in ((2, 4), (3, 4), (3, 5)))]


wrong(
    define("keeps_first_maximum", keeps_first_maximum),
    "memory.blocks",
    _queries,
    _softmax_times,
)


def attends_but_the_last(query: Tensor, keys: Tensor, offsets: Tensor) -> Tensor:
    """Does not write the result for the last sequence of a ragged batch."""
    result = torch.empty(query.shape, dtype=query.dtype)
    ends = offsets.tolist()
    for start, end in itertools.pairwise(ends[:-1]):
        result[start:end] = _softmax_times(query[start:end], keys[start:end], keys[start:end])
    return result


wrong(
    define("attends_but_the_last", attends_but_the_last, fake=like),
    "memory.uninitialized",
    lambda: [
        (
            torch.arange(10.0).view(5, 2) / 10,
            torch.arange(10.0).view(5, 2) / 5,
            torch.tensor([0, 2, 5], dtype=torch.int32),
        )
    ],
)
_COUNTS = torch.zeros(64, dtype=torch.int64)


def counts_experts_on(experts: Tensor, count: int) -> Tensor:
    """Does not reset its counters, so the result includes the counts of earlier calls."""
    _COUNTS.index_add_(0, experts.flatten(), torch.ones_like(experts.flatten()))
    return _COUNTS[:count].clone()


wrong(
    define(
        "counts_experts_on", counts_experts_on, fake=lambda experts, count: experts.new_empty(count)
    ),
    "contracts.repeated",
    lambda: [(torch.tensor([[0, 2], [1, 2]]), 4)],
)


def routes_in_float32(logits: Tensor) -> tuple[Tensor, Tensor]:
    shares = torch.softmax(logits, -1, dtype=torch.float32)
    best, experts = shares.max(-1)
    return best.to(logits.dtype), experts


wrong(define("routes_in_float32", routes_in_float32), "dtypes.double", one)


def splits_fused(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two views of one tensor, although results must not share memory."""
    left, right = (qkv * 0.5).contiguous().chunk(2)
    return left, right


wrong(
    define(
        "splits_fused",
        splits_fused,
        fake=lambda qkv: tuple(torch.empty_like(part) for part in qkv.chunk(2)),
    ),
    "contracts.schema",
    lambda: [(torch.arange(8.0).view(4, 2),)],
)

# --------------------------------------------------------------------------------------------------
# Sampling


def keeps_top_shares(logits: Tensor, share: float) -> Tensor:
    """Writes to the argument's memory through NumPy, which the schema does not declare."""
    values = logits.detach().contiguous().numpy()
    kept = max(1, math.ceil(values.shape[-1] * share))
    least = np.sort(values, -1)[..., -kept, None]
    values[values < least] = -np.inf
    return torch.from_numpy(values.copy())


wrong(
    define("keeps_top_shares", keeps_top_shares, fake=like),
    "contracts.schema",
    lambda: [(torch.tensor([[0.5, 2.0, -1.0, 1.0]]), 0.5)],
)
_STREAM = torch.Generator().manual_seed(7)


def samples_from_own_stream(logits: Tensor) -> Tensor:
    noise = torch.rand(logits.shape, generator=_STREAM, dtype=torch.float64)
    return (logits.double() - (-noise.log()).log()).argmax(-1)


wrong(
    define(
        "samples_from_own_stream",
        samples_from_own_stream,
        tags=torch.Tag.nondeterministic_seeded,
    ),
    "contracts.repeated",
    one,
)

# --------------------------------------------------------------------------------------------------
# Tables, bags and segments


def _bag_sums(table: Tensor, index: Tensor, bag: Tensor, count: int) -> Tensor:
    return table.new_zeros(count, table.shape[1]).index_add(0, bag, table[index])


def _overwriting(ctx: Any, grad: Tensor) -> Any:
    table, index, bag = ctx.saved_tensors
    result = torch.zeros_like(table)
    result[index] = grad[bag]
    return result, None, None, None


_bags = define("gradient_overwrites", _bag_sums)
_bags.register_autograd(_overwriting, setup_context=save)
wrong(
    _bags,
    "subsystems.gradcheck",
    # The example does not show the fault, because no index repeats.
    lambda: [(torch.arange(10.0).view(5, 2), torch.tensor([1, 0, 3]), torch.tensor([0, 0, 1]), 2)],
)


def _in_float32(ctx: Any, grad: Tensor) -> Any:
    table, rows = ctx.saved_tensors
    return torch.zeros(table.shape).index_add(0, rows, grad.float()), None


def _rows(table: Tensor, rows: Tensor) -> Tensor:
    return table[rows]


_looked_up = define("gradient_in_float32", _rows)
_looked_up.register_autograd(_in_float32, setup_context=save)
wrong(
    _looked_up,
    "subsystems.gradcheck",
    lambda: [(torch.arange(6.0).view(3, 2), torch.tensor([1, 0, 1]))],
)
_PADDED: dict[Any, Tensor] = {}


def padded_over_last(values: Tensor, offsets: Tensor, longest: int) -> Tensor:
    """Reuses a buffer without clearing it, so values of a longer row remain after a shorter one."""
    key = len(offsets), longest, values.dtype
    if key not in _PADDED:
        _PADDED[key] = torch.zeros(len(offsets) - 1, longest, dtype=values.dtype)
    ends = offsets.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        part = values[start:end][:longest]
        _PADDED[key][row, : len(part)] = part
    return _PADDED[key].clone()


wrong(
    define(
        "padded_over_last",
        padded_over_last,
        fake=lambda values, offsets, longest: values.new_empty(offsets.shape[0] - 1, longest),
    ),
    "contracts.state",
    lambda: [
        (torch.arange(1.0, 6), torch.tensor([0, 2, 5]), 4),
        (torch.arange(1.0, 6), torch.tensor([0, 4, 5]), 4),
    ],
)


def row_sums_by_reduceat(values: Tensor, offsets: Tensor) -> Tensor:
    """Returns the next element instead of 0 for an empty row, because NumPy's reduceat does so."""
    ends = offsets.numpy()
    if not len(values):
        return values.new_zeros(len(offsets) - 1)
    starts = np.minimum(ends[:-1], len(values) - 1)
    return torch.from_numpy(np.add.reduceat(values.detach().contiguous().numpy(), starts))


def _row_sums(values: Tensor, offsets: Tensor) -> Tensor:
    parts = [values[start:end].sum() for start, end in itertools.pairwise(offsets)]
    return torch.stack(parts) if parts else values.new_zeros(0)


wrong(
    define(
        "row_sums_by_reduceat",
        row_sums_by_reduceat,
        fake=lambda values, offsets: values.new_empty(offsets.shape[0] - 1),
    ),
    "memory.given",
    lambda: [(torch.arange(1.0, 6), torch.tensor([0, 2, 2, 5]))],
    _row_sums,
)


def segments_from_zero(x: Tensor, segments: Tensor, count: int) -> Tensor:
    """Starts each maximum at 0, so it returns 0 if all elements of a segment are negative."""
    return x.new_zeros(count).index_reduce_(0, segments, x, "amax")


wrong(
    define(
        "segments_from_zero",
        segments_from_zero,
        fake=lambda x, segments, count: x.new_empty(count),
    ),
    "values.inf",
    lambda: [(torch.tensor([1.0, 3, 2, 5]), torch.tensor([0, 1, 1, 0]), 2)],
    lambda x, segments, count: x.new_full((count,), float("-inf")).index_reduce_(
        0, segments, x, "amax"
    ),
)

# --------------------------------------------------------------------------------------------------
# Sparse matrices


def _csr() -> list[Any]:
    return [(torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.5]]).to_sparse_csr(),)]


wrong(
    define(
        "fakes_columns_of_csr",
        lambda x: x.crow_indices().diff(),
        schema="(Tensor x) -> Tensor",
        fake=lambda x: x.crow_indices().new_empty(x.shape[1]),
    ),
    "subsystems.fake_symbols",
    _csr,
)


def scales_csr_in_place(x: Tensor) -> Tensor:
    """Multiplies the values of its argument in place, which the schema does not declare."""
    values = x.values().mul_(2)
    return values.sum()


wrong(
    define("scales_csr_in_place", scales_csr_in_place, fake=lambda x: x.values().new_empty(())),
    "contracts.schema",
    _csr,
)
