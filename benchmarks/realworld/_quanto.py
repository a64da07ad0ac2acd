"""Calls to operators of optimum-quanto: quantization, and products with quantized weights."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch

from _case import Case, Package

FOR_CUDA = "its kernel is for CUDA"


def package() -> Package:
    importlib.import_module("optimum.quanto")
    names = ("gemm_f16f8_marlin", "gemm_f16i4_awq", "gemm_f16i4_marlin", "pack_fp8_marlin")
    left_out = {f"quanto::{name}": FOR_CUDA for name in names}
    return Package("optimum.quanto", ("quanto",), [*_cases()], left_out)


def _cases() -> Iterator[Case]:
    torch.manual_seed(0)
    x, scale = torch.randn(32, 32), torch.rand(32, 1) + 0.1
    packed = torch.randint(0, 255, (16, 32), dtype=torch.uint8)
    weights = torch.randint(-127, 127, (32, 32), dtype=torch.int8)
    shift, zero = torch.rand(32, 1), torch.randint(0, 8, (32, 1), dtype=torch.int8)
    one, half, whole = scale[0, 0], x.bfloat16(), weights.clone()
    yield Case("quanto::quantize_symmetric", lambda: (x, torch.int8, 0, scale), "by row")
    yield Case("quanto::quantize_symmetric", lambda: (x, torch.int8, None, one), "by tensor")
    yield Case("quanto::quantize_symmetric", lambda: (x, torch.float8_e5m2, 0, scale), "float8")
    yield Case("quanto::quantize_affine", lambda: (x, 4, 0, None, scale, shift), "4 bits")
    yield Case("quanto::quantize_affine", lambda: (x, 2, 0, None, scale, zero), "2 bits")
    yield Case("quanto::unpack", lambda: (packed, 4), "4 bits")
    yield Case("quanto::unpack", lambda: (packed, 2), "2 bits")
    yield Case("quanto::qbytes_mm", lambda: (x, weights, scale), "float32")
    yield Case("quanto::qbytes_mm", lambda: (half, weights, scale.bfloat16()), "bfloat16")
    yield Case("quanto::qbytes_mm", lambda: (whole, weights, scale), "int8")
