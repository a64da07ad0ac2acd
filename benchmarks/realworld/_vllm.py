"""Calls to operators of vLLM's CPU build.

The operators compute activations, norms, rotary positions, quantization and sampling.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import torch

from _case import Case, Package


def package() -> Package:
    importlib.import_module("vllm._custom_ops")
    return Package("vllm", ("_C",), [*_cases()])


def _cases() -> Iterator[Case]:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(4, 64), torch.randn(4, 64), torch.rand(64) + 0.5
    for name in ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"):
        yield _case(name, torch.empty(4, 32), x)
    for name in ("gelu_new", "gelu_fast", "gelu_quick", "gelu_tanh"):
        yield _case(name, torch.empty(4, 64), x)
    yield _case("rms_norm", torch.empty(4, 64), x, weight, 1e-6)
    yield _case("fused_add_rms_norm", x, residual, weight, 1e-6)
    positions, table = torch.tensor([0, 3, 1, 7]), torch.randn(8, 16)
    yield _case("rotary_embedding", positions, x, residual, 16, table, True)
    rows = torch.empty(4, 64, dtype=torch.int8)
    yield _case("static_scaled_int8_quant", rows, x, torch.tensor([0.05]), None)
    yield _case("dynamic_scaled_int8_quant", rows, x, torch.empty(4, 1), None)
    yield _case("greedy_argmax", x)
    yield _case("fused_gumbel_argmax", x, torch.tensor([3, 1, 4, 1]))


def _case(name: str, *arguments: object) -> Case:
    return Case(f"_C::{name}", lambda: arguments)
