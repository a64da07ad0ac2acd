"""Calls to the operators of bitsandbytes: 4-bit and 8-bit quantization, and optimizers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from _case import Case, Package

# The names of the optimizers, and whether each has a second state tensor.
OPTIMIZERS = {
    "adam": True,
    "lamb": True,
    "ademamix": True,
    "momentum": False,
    "lars": False,
    "lion": False,
    "rmsprop": False,
    "adagrad": False,
}
SIZE, BLOCK = 512, 256  # sizes of a parameter, and of a block of the 8-bit state with one scale
BETAS = (0.9, 0.99, 0.999)


def package() -> Package:
    functional = importlib.import_module("bitsandbytes.functional")
    cases = [*_four_bits(functional), *_eight_bits(functional), *_optimizers(functional)]
    programs = {
        "4-bit layers, trained": lambda: _trained(_four_bit_layer),
        "4-bit layers, compiled": lambda: _trained(_four_bit_layer, compiles=True),
        "8-bit layers, trained": lambda: _trained(_eight_bit_layer),
        "AdamW": lambda: _optimized("AdamW"),
        "8-bit AdamW": lambda: _optimized("AdamW8bit", min_8bit_size=SIZE),
        "8-bit Lion": lambda: _optimized("Lion8bit", min_8bit_size=SIZE),
    }
    return Package("bitsandbytes", ("bitsandbytes",), cases, programs=programs)


def _four_bits(functional: Any) -> Iterator[Case]:
    torch.manual_seed(0)
    x, row, bias = torch.randn(64, 64), torch.randn(1, 64), torch.randn(64)
    ops = torch.ops.bitsandbytes
    for kind in ("nf4", "fp4"):
        table = functional.get_4bit_type(kind, device="cpu")
        packed, scales = ops.quantize_4bit(x, 64, kind, torch.uint8)
        full, stored = (packed, scales, 64, kind, x.shape, torch.float32), (x, 64, kind)
        product = (row, packed, x.shape, scales)
        yield _case("quantize_4bit", stored, torch.uint8, label=kind)
        yield _case("dequantize_4bit", full, label=kind)
        yield _case("gemv_4bit", product, table, 64, label=kind)
        yield _case("gemm_4bit", product, 64, kind, label=kind)
        yield _case("gemm_4bit", product, 64, kind, bias, label=f"{kind}, with a bias")
    yield _case("quantize_4bit", (x, 64, "nf4", torch.bfloat16), label="stored as bfloat16")
    # The scales are quantized too, as with the option `bnb_4bit_use_double_quant`.
    code = functional.create_dynamic_map()
    small, outer = ops.quantize_blockwise(scales, code, 256)
    nested = (row, packed, x.shape, outer, 64, "fp4", bias, small, code, torch.zeros(()))
    yield _case("gemm_4bit", nested, label="nested scales")


def _eight_bits(functional: Any) -> Iterator[Case]:
    torch.manual_seed(1)
    x, code, bias = torch.randn(64, 64), functional.create_dynamic_map(), torch.randn(64)
    ops = torch.ops.bitsandbytes
    small, scales = ops.quantize_blockwise(x, code, 64)
    for dtype in (torch.float32, torch.bfloat16):
        label = str(dtype).removeprefix("torch.")
        block = (small, scales, code, 64, dtype)
        yield _case("quantize_blockwise", (x.to(dtype), code, 64), label=label)
        yield _case("dequantize_blockwise", block, label=label)
    i8, stats, _ = ops.int8_vectorwise_quant(x)
    i32 = ops.int8_linear_matmul(i8, i8)
    yield _case("int8_vectorwise_quant", (x,))
    yield _case("int8_vectorwise_quant", (x, 2.5), label="with outliers")
    yield _case("int8_vectorwise_dequant", (i8, stats))
    yield _case("int8_linear_matmul", (i8, i8))
    # This is the only out= overload with a CPU kernel.
    yield Case("bitsandbytes::int8_linear_matmul.out", lambda: (i8, i8, torch.zeros_like(i32)))
    yield _case("int8_mm_dequant", (i32, stats, stats))
    yield _case("int8_mm_dequant", (i32, stats, stats, torch.float32, bias), label="with a bias")
    yield _case("int8_scaled_mm", (i8, i8, stats, stats))
    yield _case("int8_scaled_mm", (i8, i8, stats, stats, bias, torch.float32), label="with a bias")
    kept, kept_stats, outliers = ops.int8_vectorwise_quant(x, 2.5)
    mixed = (x, kept, i8, kept_stats, stats)
    yield _case("int8_mixed_scaled_mm", mixed)
    yield _case("int8_mixed_scaled_mm", (*mixed, outliers, bias), label="with outliers")


def _optimizers(functional: Any) -> Iterator[Case]:
    signed = functional.create_dynamic_map(signed=True)
    unsigned = functional.create_dynamic_map(signed=False)
    for name, has_second in OPTIMIZERS.items():
        yield Case("bitsandbytes::optimizer_update_32bit", _update(name, has_second), name)
        yield Case(
            "bitsandbytes::optimizer_update_8bit_blockwise",
            _blockwise_update(name, has_second, signed, unsigned),
            name,
        )
    first = _update("momentum", has_second=False, step=1)
    yield Case("bitsandbytes::optimizer_update_32bit", first, "momentum, the first step")
    bounded = _update("lamb", has_second=True, max_unorm=0.5)
    yield Case("bitsandbytes::optimizer_update_32bit", bounded, "lamb, of a bounded norm")


def _update(
    name: str, has_second: bool, step: int = 3, max_unorm: float = 0.0
) -> Callable[[], tuple[Any, ...]]:
    def arguments() -> tuple[Any, ...]:
        torch.manual_seed(2)
        g, p = torch.randn(SIZE), torch.randn(SIZE)
        first = torch.rand((2, SIZE) if name == "ademamix" else SIZE)
        second = torch.rand(SIZE) if has_second else None
        norm = torch.zeros(1) if max_unorm else None
        numbers = (max_unorm, 1.0, *BETAS, 5.0, 1e-8, 0.01, step, 1e-3, 1.0, False)
        return (name, g, p, first, second, norm, *numbers)

    return arguments


def _blockwise_update(
    name: str, has_second: bool, signed: Tensor, unsigned: Tensor
) -> Callable[[], tuple[Any, ...]]:
    def arguments() -> tuple[Any, ...]:
        torch.manual_seed(3)
        g, p = torch.randn(SIZE), torch.randn(SIZE)
        twice = (2,) if name == "ademamix" else ()
        first, scales = _bytes(*twice, SIZE), torch.rand(*twice, SIZE // BLOCK)
        second = _bytes(SIZE) if has_second else None
        second_scales = torch.rand(SIZE // BLOCK) if has_second else None
        maps = (signed.clone(), unsigned.clone() if has_second else None)
        numbers = (*BETAS, 5.0, 1e-8, 3, 1e-3)
        last = (0.01, 1.0, False)
        return (name, g, p, first, second, *numbers, *maps, scales, second_scales, *last)

    return arguments


def _four_bit_layer() -> nn.Module:
    modules = importlib.import_module("bitsandbytes.nn")
    return modules.Linear4bit(64, 64, compute_dtype=torch.float32, compress_statistics=True)


def _eight_bit_layer() -> nn.Module:
    modules = importlib.import_module("bitsandbytes.nn")
    return modules.Linear8bitLt(64, 64, has_fp16_weights=False, threshold=2.0)


def _trained(make: Callable[[], nn.Module], compiles: bool = False) -> list[Tensor]:
    """Train a factor in front of two frozen layers. Return the layers' results and the gradient."""
    torch.manual_seed(4)
    layers = nn.Sequential(make(), nn.GELU(), make()).to("cpu").requires_grad_(False)
    torch.compiler.reset()
    called = torch.compile(layers, backend="aot_eager") if compiles else layers
    x, factor = torch.randn(3, 64), torch.ones(64, requires_grad=True)
    result = called(x * factor)
    result.square().sum().backward()
    assert factor.grad is not None
    return [result, factor.grad]


def _optimized(name: str, **options: int) -> list[Tensor]:
    torch.manual_seed(5)
    parameters = [nn.Parameter(torch.randn(SIZE)) for _ in range(2)]
    optimizers = importlib.import_module("bitsandbytes.optim")
    optimizer = getattr(optimizers, name)(parameters, lr=1e-2, weight_decay=0.1, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(SIZE)
        optimizer.step()
    states = [optimizer.state[parameter] for parameter in parameters]
    kept = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return [*parameters, *kept]


def _case(name: str, arguments: tuple[Any, ...], *more: Any, label: str = "") -> Case:
    return Case(f"bitsandbytes::{name}", lambda: (*arguments, *more), label)


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)
