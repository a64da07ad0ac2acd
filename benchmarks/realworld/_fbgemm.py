"""Calls to operators of fbgemm's CPU build, for jagged tensors (recommenders) and quantization."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch

from _case import Case, Package


def package() -> Package:
    importlib.import_module("fbgemm_gpu")
    return Package("fbgemm_gpu", ("fbgemm",), [*_jagged(), *_permuted(), *_quantized()])


def _jagged() -> Iterator[Case]:
    torch.manual_seed(0)
    values, other, dense = torch.randn(6, 4), torch.randn(6, 4), torch.randn(3, 3, 4)
    offsets, lengths = torch.tensor([0, 2, 3, 6]), torch.tensor([2, 1, 3])
    rows, places = torch.randn(3, 5), torch.tensor([2, 0, 2])
    yield _case("asynchronous_complete_cumsum", lengths)
    yield _case("asynchronous_inclusive_cumsum", lengths)
    yield _case("asynchronous_exclusive_cumsum", lengths)
    yield _case("offsets_range", offsets[:-1].clone(), 6)
    yield _case("lengths_range", lengths)
    yield _case("jagged_to_padded_dense", values, [offsets], [3], 0.5)
    yield _case("jagged_2d_to_dense", values, offsets, 3)
    yield _case("jagged_1d_to_dense", torch.arange(6.0), offsets, 3, 7)
    yield _case("dense_to_jagged", dense, [offsets], 6)
    yield _case("jagged_dense_elementwise_add", values, [offsets], dense)
    yield _case("jagged_dense_elementwise_mul", values, [offsets], dense)
    yield _case("jagged_softmax", values, offsets, 3)
    yield _case("jagged_jagged_bmm", values, other, offsets, 3)
    yield _case("jagged_dense_bmm", values, offsets, torch.randn(3, 4, 5), 3)
    yield _case("jagged_index_select", values, lengths, places)
    yield _case("batched_dense_vec_jagged_2d_mul", torch.randn(3, 3), values, offsets)
    yield _case("segment_sum_csr", 1, offsets, torch.randn(6))
    yield _case("pack_segments", values, lengths, 3)
    yield _case("index_select_dim0", rows, places)


def _permuted() -> Iterator[Case]:
    torch.manual_seed(1)
    order, lengths = torch.tensor([1, 0], dtype=torch.int32), torch.tensor([[2, 1, 0], [1, 1, 1]])
    values, weights = torch.tensor([5, 1, 7, 3, 2, 4]), torch.rand(6)
    yield _case("invert_permute", torch.tensor([2, 0, 1]))
    yield _case("permute_2D_sparse_data", order, lengths, values, weights, 6)
    yield _case("permute_1D_sparse_data", order, torch.tensor([2, 4]), values, weights, 6)
    sizes = torch.tensor([5, 5])
    yield _case("block_bucketize_sparse_features", lengths.flatten(), values, True, False, sizes, 2)


def _quantized() -> Iterator[Case]:
    torch.manual_seed(2)
    x, ops = torch.randn(4, 8), torch.ops.fbgemm
    yield _case("FloatToFused8BitRowwiseQuantized", x)
    yield _case("Fused8BitRowwiseQuantizedToFloat", ops.FloatToFused8BitRowwiseQuantized(x))
    for bits in (4, 2):
        packed = ops.FloatToFusedNBitRowwiseQuantizedSBHalf(x, bits)
        yield _case("FloatToFusedNBitRowwiseQuantizedSBHalf", x, bits)
        yield _case("FusedNBitRowwiseQuantizedSBHalfToFloat", packed, bits)
    yield _case("FloatToBfloat16Quantized", x)
    yield _case("Bfloat16QuantizedToFloat", ops.FloatToBfloat16Quantized(x))


def _case(name: str, *arguments: object) -> Case:
    return Case(f"fbgemm::{name}", lambda: arguments)
