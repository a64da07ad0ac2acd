"""Calls to operators of torchao: affine quantization, float8, codebooks, and a logger."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator

import torch

from _case import Case, Package

# The modules that define operators and can be imported without a GPU.
MODULES = (
    "quantization",
    "quantization.pt2e.reference_representation_rewrite",
    "sparsity.blocksparse",
    "prototype.mx_formats.kernels",
    "prototype.moe_training.kernels.mxfp8.quant",
    "prototype.quantization.codebook_coreml.codebook_ops",
    "prototype.spinquant.hadamard_utils",
)
NAMESPACES = ("torchao", "ao", "blocksparse", "float8_sparse", "quant", "quant_logger")
CUTE, FLY, MSLK = "it is written for CuTe on a GPU", "it is written for ROCm", "it needs MSLK"
LEFT_OUT = {
    "ao::mslk_calculate_group_max": MSLK,
    "ao::mslk_quantize_nvfp4": MSLK,
    "ao::mslk_quantize_nvfp4_stacked": MSLK,
    "blocksparse::addmm": "it needs Triton",
    "blocksparse::int_addmm": "it needs Triton",
    "float8_sparse::fp8_sparse_mm": "it needs hipSPARSELt",
    "quant::choose_qparams_and_quantize_codebook_coreml": "it needs coremltools",
    "torchao::hadamard_transform": "it needs fast_hadamard_transform",
    "torchao::mxfp8_quantize_2d_1x32_cutedsl": CUTE,
    "torchao::mxfp8_quantize_2d_32x1_cutedsl": CUTE,
    "torchao::mxfp8_quantize_3d_cutedsl": CUTE,
    "torchao::mxfp8_quantize_2d_1x32_flydsl": FLY,
    "torchao::mxfp8_quantize_2d_32x1_flydsl": FLY,
    "torchao::mxfp8_quantize_3d_flydsl": FLY,
}


def package() -> Package:
    for module in MODULES:
        importlib.import_module(f"torchao.{module}")
    # The logger's operator prints, so redirect it to a file.
    logger = importlib.import_module("torchao.prototype.quant_logger.quant_logger")
    logger.enable_log_stats_to_file(os.devnull)
    return Package("torchao", NAMESPACES, [*_affine(), *_others()], LEFT_OUT)


def _affine() -> Iterator[Case]:
    torch.manual_seed(0)
    x, scale = torch.randn(32, 32), torch.rand(32) + 0.1
    zero = torch.zeros(32, dtype=torch.int32)
    quantized = torch.randint(-127, 127, (32, 32), dtype=torch.int8)
    block, ends = [1, 32], (-128, 127)
    learnt, learnt_x = scale.clone().requires_grad_(), x.clone().requires_grad_()
    choose, dequantize = "torchao::choose_qparams_affine", "torchao::dequantize_affine"
    yield Case(choose, lambda: (x, "SYMMETRIC", block, torch.int8, *ends), "symmetric")
    yield Case(choose, lambda: (x, "ASYMMETRIC", [32, 32], torch.uint8, 0, 255, 1e-6), "asymmetric")
    yield Case(choose, lambda: (learnt_x, "SYMMETRIC", block, torch.int8, *ends), "learnt")
    yield Case("torchao::quantize_affine", lambda: (x, block, scale, zero, torch.int8, *ends))
    yield Case(dequantize, lambda: (quantized, block, scale, zero, torch.int8, *ends))
    yield Case(dequantize, lambda: (quantized, block, learnt, zero, torch.int8, *ends), "learnt")
    weight, scales = torch.randint(-8, 8, (16, 32), dtype=torch.int8), torch.rand(16, 2)
    points, bias = torch.zeros(16, 2, dtype=torch.int32), torch.randn(16)
    yield Case(
        "torchao::reference_dqlinear_int4",
        lambda: (x, 1e-6, weight, scales, points, bias, [1, 16]),
    )


def _others() -> Iterator[Case]:
    torch.manual_seed(1)
    x, scale = torch.randn(32, 32), torch.rand(32, 1) + 0.1
    small = x.to(torch.float8_e4m3fn)
    rows, columns = torch.tensor([0, 1, 2]), torch.tensor([1, 0])
    blocks, codes = torch.randn(2, 16, 16), torch.randint(0, 16, (32, 32))
    codebook = torch.randn(1, 2, 16, 1)
    float8 = "affine_float8_non_decomposed"
    yield Case("torchao::choose_scale_float8", lambda: (x, [1, 32]))
    yield Case("torchao::choose_scale_float8", lambda: (x, [1, 32], torch.float8_e5m2), "e5m2")
    yield Case(f"torchao::quantize_{float8}", lambda: (x, scale))
    yield Case(f"torchao::dequantize_{float8}", lambda: (small, scale))
    yield Case(f"torchao::dequantize_{float8}", lambda: (small, scale, torch.bfloat16), "bfloat16")
    yield Case("blocksparse::bsr_to_dense", lambda: (rows, columns, blocks, 32, 32))
    yield Case("quant::dequantize_codebook", lambda: (codes, codebook, 4, [-1, 16]))
    yield Case("quant_logger::log_tensor", lambda: (x.clone(), "layer.0", "linear", "act"))
