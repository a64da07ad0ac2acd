"""Correct kernels of models that were written without running the checks.

They raise for some invalid arguments, and assume that the other arguments are valid.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tests.testing.zoo.specimen import define, floats_only, like, right, save

# --------------------------------------------------------------------------------------------------
# Quantisation


def groups_dequantized(packed: Tensor, scales: Tensor, group: int) -> Tensor:
    """Unpack 4-bit numbers, two per byte, and multiply each group of columns by its scale."""
    if packed.dtype is not torch.uint8 or packed.shape[1] * 2 != scales.shape[1] * group:
        raise ValueError("groups_dequantized takes bytes, and a scale for each group of columns")
    low, high = packed & 15, packed >> 4
    codes = torch.stack([low, high], -1).flatten(1).to(torch.int8) - 8
    return codes.to(scales.dtype) * scales.repeat_interleave(group, 1)


right(
    define(
        "groups_dequantized",
        groups_dequantized,
        fake=lambda packed, scales, group: scales.new_empty(packed.shape[0], packed.shape[1] * 2),
    ),
    lambda: [
        (
            torch.arange(8, dtype=torch.uint8).view(2, 4) * 31,
            torch.tensor([[0.5, 2.0], [1.0, 0.25]]),
            4,
        )
    ],
)


def smoothed_codes(x: Tensor, smooth: Tensor) -> tuple[Tensor, Tensor]:
    floats_only("smoothed_codes", x, smooth)
    exact = x.double() / smooth.double()
    scale = exact.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    codes = (exact / scale).round().clamp(-128, 127).to(torch.int8)
    return codes, scale.squeeze(-1).to(torch.float32)


right(
    define("smoothed_codes", smoothed_codes),
    lambda: [(torch.tensor([[0.5, -1.0, 2.0], [4.0, 0.3, -0.1]]), torch.tensor([1.0, 0.5, 2.0]))],
)


def writes_quantized(codes: Tensor, scales: Tensor, keys: Tensor, slots: Tensor) -> None:
    """Quantize keys, with one scale per key, and write them to their slots of a cache."""
    for key, slot in zip(keys, slots.tolist(), strict=True):
        scale = key.abs().max().clamp(min=1e-6) / 127
        codes[slot] = (key / scale).round().to(codes.dtype)
        scales[slot] = scale


right(
    define(
        "writes_quantized",
        writes_quantized,
        mutates_args={"codes", "scales"},
        fake=lambda *args: None,
    ),
    lambda: [
        (
            torch.zeros(5, 3, dtype=torch.int8),
            torch.zeros(5),
            torch.tensor([[1.0, -2.0, 0.5], [3.0, 0.0, 1.0]]),
            torch.tensor([4, 1]),
        )
    ],
)

# --------------------------------------------------------------------------------------------------
# Attention


def attention_in_blocks(
    query: Tensor, keys: Tensor, values: Tensor, scale: float | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute attention in blocks of 64 keys. Also return the log-sum-exp for each query."""
    floats_only("attention_in_blocks", query, keys, values)
    wide = torch.promote_types(query.dtype, torch.float32)
    scale = 1 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    exact = query.to(wide) * scale
    highest = exact.new_full((*query.shape[:-1], 1), float("-inf"))
    total = torch.zeros_like(highest)
    result = exact.new_zeros(*query.shape[:-1], values.shape[-1])
    rows = torch.arange(query.shape[-2]).unsqueeze(-1) + keys.shape[-2] - query.shape[-2]
    for start in range(0, keys.shape[-2], 64):
        block = slice(start, start + 64)
        scores = exact @ keys[..., block, :].to(wide).mT
        if causal:
            columns = torch.arange(start, start + scores.shape[-1])
            scores = scores.masked_fill(columns > rows, float("-inf"))
        new = torch.maximum(highest, scores.amax(-1, keepdim=True))
        fixed = new.masked_fill(new == float("-inf"), 0)
        weights, old = (scores - fixed).exp(), (highest - fixed).exp()
        total = total * old + weights.sum(-1, keepdim=True)
        result = result * old + weights @ values[..., block, :].to(wide)
        highest = new
    result = torch.where(total > 0, result / total, torch.where(total == 0, 0, total))
    return result.to(query.dtype), (highest + total.log()).squeeze(-1).to(torch.float32)


right(
    define(
        "attention_in_blocks",
        attention_in_blocks,
        fake=lambda query, keys, values, scale=None, causal=False: (
            query.new_empty(*query.shape[:-1], values.shape[-1]),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        ),
    ),
    lambda: [
        (
            torch.arange(16.0).view(2, 2, 4) / 8,
            torch.arange(24.0).view(2, 3, 4).sin(),
            torch.ones(2, 3, 5),
        ),
        (
            torch.ones(1, 3, 2),
            torch.arange(6.0).view(1, 3, 2),
            torch.arange(9.0).view(1, 3, 3),
            0.5,
            True,
        ),
    ],
)


def ragged_attention(query: Tensor, keys: Tensor, starts: Tensor, longest: int) -> Tensor:
    """Compute attention for a ragged batch, in which each sequence attends only to itself."""
    floats_only("ragged_attention", query, keys)
    result = torch.zeros(query.shape, dtype=query.dtype)
    ends = starts.tolist()
    for start, end in itertools.pairwise(ends):
        part = slice(start, min(end, start + longest))
        result[part] = (query[part] @ keys[part].mT).softmax(-1) @ keys[part]
    return result


right(
    define("ragged_attention", ragged_attention, fake=lambda query, *others: like(query)),
    lambda: [
        (
            torch.arange(10.0).view(5, 2) / 10,
            torch.arange(10.0).view(5, 2).cos(),
            torch.tensor([0, 2, 5], dtype=torch.int32),
            3,
        )
    ],
)


def biased_by_distance(scores: Tensor) -> Tensor:
    floats_only("biased_by_distance", scores)
    heads, rows, columns = scores.shape
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
    distance = torch.arange(columns) - torch.arange(rows).unsqueeze(-1)
    return (scores + (slopes.view(-1, 1, 1) * distance).to(scores.dtype)).contiguous()


_biased = define("biased_by_distance", biased_by_distance, fake=like)
_biased.register_autograd(lambda ctx, grad: grad)
right(_biased, lambda: [(torch.arange(12.0).view(2, 2, 3),)])

# --------------------------------------------------------------------------------------------------
# Routing and sampling


def aligned_experts(experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor]:
    """Sort tokens by their expert, and pad the tokens of each expert with -1 to whole blocks.

    The second result is the expert of each block. Both results are as long as they can become for
    this number of tokens.
    """
    flat = experts.flatten()
    most = -(-(flat.numel() + count * (block - 1)) // block)
    order = torch.full((most * block,), -1, dtype=torch.int32)
    owners = torch.full((most,), -1, dtype=torch.int32)
    place = 0
    for expert in range(count):
        tokens = (flat == expert).nonzero().flatten()
        blocks = -(-len(tokens) // block)
        order[place * block : place * block + len(tokens)] = tokens.int()
        owners[place : place + blocks] = expert
        place += blocks
    return order, owners


def _fake_aligned(experts: Tensor, count: int, block: int) -> tuple[Tensor, Tensor]:
    most = -(-(experts.numel() + count * (block - 1)) // block)
    return (
        experts.new_empty(most * block, dtype=torch.int32),
        experts.new_empty(most, dtype=torch.int32),
    )


right(
    define("aligned_experts", aligned_experts, fake=_fake_aligned),
    lambda: [(torch.tensor([[0, 2], [1, 2], [2, 0]]), 4, 2)],
)


def permuted_tokens(x: Tensor, order: Tensor) -> Tensor:
    return x.index_select(0, order)


_permuted = define("permuted_tokens", permuted_tokens)
_permuted.register_autograd(
    # The operator permutes rows, so its gradient is the inverse permutation.
    lambda ctx, grad: (grad.index_select(0, ctx.saved_tensors[1].argsort()), None),
    setup_context=save,
)
right(_permuted, lambda: [(torch.arange(8.0).view(4, 2), torch.tensor([2, 0, 3, 1]))])


def within_top_shares(logits: Tensor, share: float) -> Tensor:
    """Keep the most likely tokens up to a total probability, and set the others to -inf."""
    floats_only("within_top_shares", logits)
    ordered, places = logits.sort(dim=-1, descending=True, stable=True)
    shares = ordered.float().softmax(-1)
    before = shares.cumsum(-1) - shares
    ordered = ordered.masked_fill(before > share, float("-inf"))
    return torch.empty_like(ordered).scatter_(-1, places, ordered).contiguous()


right(
    define("within_top_shares", within_top_shares, fake=like),
    lambda: [(torch.tensor([[0.5, 2.0, -1.0, 1.0]]), 0.7)],
)


def sampled_tokens(logits: Tensor, temperature: float) -> Tensor:
    """Sample one token per row with the Gumbel-max trick."""
    floats_only("sampled_tokens", logits)
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.empty(logits.shape, dtype=torch.float64).exponential_()
    return (logits.double() / temperature - noise.log()).argmax(-1)


right(
    define(
        "sampled_tokens",
        sampled_tokens,
        tags=torch.Tag.nondeterministic_seeded,
        fake=lambda logits, temperature: logits.new_empty(logits.shape[:-1], dtype=torch.int64),
    ),
    lambda: [(torch.tensor([[0.5, 2.0, -1.0, 1.0], [0.0, 0.1, 0.2, 0.3]]), 0.7)],
)

# --------------------------------------------------------------------------------------------------
# Ragged batches, bags and sparse matrices


def weighted_bags(table: Tensor, index: Tensor, offsets: Tensor, weights: Tensor) -> Tensor:
    ends = torch.cat([offsets, offsets.new_tensor([len(index)])])
    bag = torch.repeat_interleave(torch.arange(len(offsets)), ends.diff())
    rows = table.index_select(0, index[: len(bag)]) * weights[: len(bag)].unsqueeze(-1)
    return table.new_zeros(len(offsets), table.shape[1]).index_add(0, bag, rows)


def _gradient_of_bags(ctx: Any, grad: Tensor) -> Any:
    table, index, offsets, weights = ctx.saved_tensors
    # Compute the bag of each index without repeat_interleave. That function reads data, so
    # compilers could not trace this formula.
    bag = torch.searchsorted(offsets, torch.arange(index.shape[0]), right=True) - 1
    spread = grad.index_select(0, bag)
    of_table = torch.zeros_like(table).index_add(0, index, spread * weights.unsqueeze(-1))
    return of_table, None, None, (spread * table.index_select(0, index)).sum(-1)


_weighted = define(
    "weighted_bags",
    weighted_bags,
    fake=lambda table, index, offsets, weights: table.new_empty(offsets.shape[0], table.shape[1]),
)
_weighted.register_autograd(_gradient_of_bags, setup_context=save)
right(
    _weighted,
    lambda: [
        (
            torch.arange(8.0).view(4, 2),
            torch.tensor([1, 0, 3, 1, 2]),
            torch.tensor([0, 2, 2]),
            torch.tensor([1.0, 0.5, 2.0, 1.0, -1.0]),
        )
    ],
)


def padded_rows(values: Tensor, offsets: Tensor, longest: int, padding: float) -> Tensor:
    """Convert a ragged batch to a matrix, by cutting long rows and padding short ones."""
    if longest < 0:
        raise ValueError(f"a row has no {longest} elements")
    result = torch.full((len(offsets) - 1, longest, *values.shape[1:]), padding, dtype=values.dtype)
    ends = offsets.tolist()
    for row, (start, end) in enumerate(itertools.pairwise(ends)):
        part = values[start:end][:longest]
        result[row, : len(part)] = part
    return result


right(
    define(
        "padded_rows",
        padded_rows,
        fake=lambda values, offsets, longest, padding: values.new_empty(
            offsets.shape[0] - 1, longest, *values.shape[1:]
        ),
    ),
    lambda: [(torch.arange(10.0).view(5, 2), torch.tensor([0, 2, 5]), 4, -1.0)],
)


def rows_times_dense(starts: Tensor, columns: Tensor, values: Tensor, dense: Tensor) -> Tensor:
    rows = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff())
    result = dense.new_zeros(len(starts) - 1, dense.shape[1])
    return result.index_add(0, rows, dense.index_select(0, columns) * values.unsqueeze(-1))


right(
    define(
        "rows_times_dense",
        rows_times_dense,
        fake=lambda starts, columns, values, dense: dense.new_empty(
            starts.shape[0] - 1, dense.shape[1]
        ),
    ),
    lambda: [
        (
            torch.tensor([0, 2, 2, 3]),
            torch.tensor([0, 3, 1]),
            torch.tensor([1.0, 2.0, 0.5]),
            torch.arange(8.0).view(4, 2),
        )
    ],
)


def csr_times_vector(x: Tensor, vector: Tensor) -> Tensor:
    if x.layout is not torch.sparse_csr:
        raise TypeError(f"csr_times_vector takes matrices in CSR, got {x.layout}")
    return x @ vector


right(
    define("csr_times_vector", csr_times_vector, fake=lambda x, v: v.new_empty(x.shape[0])),
    lambda: [
        (torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.5]]).to_sparse_csr(), torch.arange(3.0) + 1)
    ],
)


def csr_scaled(x: Tensor, factor: float) -> Tensor:
    if x.layout is not torch.sparse_csr:
        raise TypeError(f"csr_scaled takes matrices in CSR, got {x.layout}")
    rows, columns = x.crow_indices().clone(), x.col_indices().clone()
    values = (x.values() * factor).to(x.dtype)
    return torch.sparse_csr_tensor(rows, columns, values, x.shape)


right(
    define("csr_scaled", csr_scaled, fake=lambda x, factor: torch.empty_like(x)),
    lambda: [(torch.tensor([[0.0, 1.0, 0.0], [2.0, 0.0, 0.5]]).to_sparse_csr(), 2.0)],
)


def softmax_of_segments(x: Tensor, segments: Tensor, count: int) -> Tensor:
    floats_only("softmax_of_segments", x)
    highest = x.new_full((count,), float("-inf")).index_reduce_(0, segments, x, "amax")
    shares = (x - highest[segments]).exp()
    return shares / x.new_zeros(count).index_add_(0, segments, shares)[segments]


right(
    define("softmax_of_segments", softmax_of_segments, fake=like),
    lambda: [(torch.tensor([1.0, -2.0, 0.5, 3.0]), torch.tensor([0, 2, 0, 2]), 3)],
)
