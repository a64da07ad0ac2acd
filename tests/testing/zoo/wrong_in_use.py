"""Faulty operators that fail only for some sizes, in a batch, or after other calls."""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.testing.zoo.specimen import (
    define,
    like,
    one,
    product,
    product_gradients,
    save,
    two,
    wrong,
)

# --------------------------------------------------------------------------------------------------
# Results that share memory in some layouts


def aliases_transposed(x: Tensor) -> Tensor:
    return x.t().contiguous()


wrong(
    define(
        "aliases_transposed",
        aliases_transposed,
        fake=lambda x: x.new_empty(x.shape[1], x.shape[0]),
    ),
    "contracts.schema",
    one,
)


@torch.library.custom_op("zoo::stock_aliases_contiguous", mutates_args=())
def stock_aliases_contiguous(x: Tensor) -> Tensor:
    return x.t().contiguous()


stock_aliases_contiguous.register_fake(lambda x: x.new_empty(x.shape[1], x.shape[0]))
wrong("zoo::stock_aliases_contiguous", "contracts.schema", one)

# --------------------------------------------------------------------------------------------------
# Gradients


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.x, ctx.y = inputs


_keeps_inputs = define("keeps_inputs_on_ctx", product)
_keeps_inputs.register_autograd(
    lambda ctx, g: ((g * ctx.y).sum_to_size(ctx.x.shape), (g * ctx.x).sum_to_size(ctx.y.shape)),
    setup_context=_keep,
)
wrong(_keeps_inputs, "subsystems.saved", two)


def _none_without_first(ctx: Any, g: Tensor) -> Any:
    x, y = ctx.saved_tensors
    if not ctx.needs_input_grad[0]:
        return None, torch.zeros_like(y)
    return (g * y).sum_to_size(x.shape), (g * x).sum_to_size(y.shape)


_second_alone = define("forgets_second_alone", product)
_second_alone.register_autograd(_none_without_first, setup_context=save)
wrong(_second_alone, "subsystems.needs_input_grad", two)


def _float_product(x: Tensor, y: Tensor) -> Tensor:
    if x.dtype is not torch.float32 or y.dtype is not torch.float32:
        raise TypeError("float_product takes float32 tensors")
    return x * y


_float_only = define("float32_with_wrong_gradient", _float_product)
_float_only.register_autograd(
    lambda ctx, g: (
        (2 * g * ctx.saved_tensors[1]).sum_to_size(ctx.saved_tensors[0].shape),
        (g * ctx.saved_tensors[0]).sum_to_size(ctx.saved_tensors[1].shape),
    ),
    setup_context=save,
)
wrong(_float_only, "subsystems.gradcheck", two)

_HELD: list[Tensor] = []


def _leak(ctx: Any, inputs: Any, output: Any) -> None:
    _HELD.append(output.detach().clone())
    ctx.save_for_backward(*inputs)


_leaks_in_setup = define("leaks_in_setup", product)
_leaks_in_setup.register_autograd(product_gradients, setup_context=_leak)
wrong(_leaks_in_setup, "contracts.leaks", two)

# --------------------------------------------------------------------------------------------------
# Batches


_middle = define("batches_ends_alone", product)


def _batched(info: Any, in_dims: Any, x: Tensor, y: Tensor) -> Any:
    """Moves the batch dimension to the front correctly only if it is the first or the last one."""

    def first(t: Tensor, dim: int | None) -> Tensor:
        if dim is None:
            return t.expand(info.batch_size, *t.shape)
        return t if dim == 0 else t.transpose(0, -1) if dim < t.dim() - 1 else t.movedim(-1, 0)

    return first(x, in_dims[0]) * first(y, in_dims[1]), 0


_middle.register_vmap(_batched)
wrong(
    _middle,
    "subsystems.vmap",
    lambda: [(torch.rand(3, 3, generator=torch.Generator().manual_seed(4)), torch.ones(3, 3))],
)

# --------------------------------------------------------------------------------------------------
# Faults for sizes that are rarely tested


def forgets_tail_of_block(x: Tensor) -> Tensor:
    flat = x.contiguous().flatten()
    result = torch.empty(flat.shape, dtype=x.dtype)
    whole = len(flat) // 256 * 256 if len(flat) >= 256 else len(flat)
    result[:whole] = flat[:whole] + 1
    return result.view(x.shape)


wrong(define("forgets_tail_of_block", forgets_tail_of_block, fake=like), "memory.blocks", one)


def wraps_rows(x: Tensor) -> Tensor:
    """Leaves out all rows after 65,535, like a CUDA kernel whose grid can have no more rows."""
    result = torch.empty(x.shape, dtype=x.dtype)
    result[:65535] = x[:65535] + 1
    return result


wrong(define("wraps_rows", wraps_rows, fake=like), "memory.blocks", one)


def splits_large(x: Tensor) -> Tensor:
    return x.contiguous() + 1


def _fake_of_small(x: Tensor) -> Tensor:
    return like(x) if x.numel() < 256 else x.new_empty(x.numel())


wrong(define("fakes_small_alone", splits_large, fake=_fake_of_small), "subsystems.fake", one)


def _fake_that_reads_one(x: Tensor) -> Tensor:
    if x.numel() == 1:
        return x.new_full(x.shape, x.item())
    return like(x)


wrong(
    define("fakes_by_one_item", splits_large, fake=_fake_that_reads_one),
    "subsystems.fake_symbols",
    one,
)


def _expanded_fake(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride()) if 0 in x.stride() else like(x)


wrong(define("fakes_expanded_strides", splits_large, fake=_expanded_fake), "subsystems.fake", one)


def _on_the_cpu(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype)


wrong(
    define("fakes_on_default_device", splits_large, fake=_on_the_cpu),
    "subsystems.fake_devices",
    one,
)

# --------------------------------------------------------------------------------------------------
# State of the process


def disables_collection(x: Tensor) -> Tensor:
    gc.disable()
    return x + 1


wrong(define("disables_collection", disables_collection, fake=like), "contracts.process", one)


def ignores_numpy_errors(x: Tensor) -> Tensor:
    np.seterr(all="ignore")
    return x + 1


wrong(define("ignores_numpy_errors", ignores_numpy_errors, fake=like), "contracts.process", one)

_FILES: list[Any] = []


def leaves_a_file_open(x: Tensor) -> Tensor:
    _FILES.append(open(os.devnull))  # noqa: SIM115  (this leak is the fault)
    if len(_FILES) > 900:  # stay below the limit of 1,024 open files
        while _FILES:
            _FILES.pop().close()
    return x + 1


wrong(define("leaves_a_file_open", leaves_a_file_open, fake=like), "contracts.leaks", one)

_CALLS = [0]


def changes_after_three(x: Tensor) -> Tensor:
    _CALLS[0] += 1
    return x + (1 if _CALLS[0] <= 3 else 2)


wrong(define("changes_after_three", changes_after_three, fake=like), "contracts.repeated", one)
_RARE = [0]


def fails_rarely(x: Tensor) -> Tensor:
    _RARE[0] += 1
    return x + (1 if _RARE[0] % 200 else 2)


wrong(define("fails_rarely", fails_rarely, fake=like), "contracts.repeated", one)
_BY_ADDRESS: dict[Any, Tensor] = {}


def caches_by_address(x: Tensor) -> Tensor:
    key = x.data_ptr(), x.shape, x.stride()
    if key not in _BY_ADDRESS:
        _BY_ADDRESS[key] = x.contiguous() * 2
    return _BY_ADDRESS[key].clone()


wrong(define("caches_by_address", caches_by_address, fake=like), "contracts.state", one)

# --------------------------------------------------------------------------------------------------
# Values of the first call that later calls reuse

_MEANS: dict[torch.Size, Tensor] = {}


def keeps_mean_of_shape(x: Tensor) -> Tensor:
    return x - _MEANS.setdefault(x.shape, x.mean())


wrong(define("keeps_mean_of_shape", keeps_mean_of_shape, fake=like), "contracts.state", one)

_FACTORS: dict[torch.dtype, Tensor] = {}


def keeps_factor(x: Tensor, factor: float) -> Tensor:
    return x * _FACTORS.setdefault(x.dtype, torch.full((), factor)).to(x)


wrong(
    define("keeps_factor", keeps_factor, fake=like),
    "contracts.state",
    lambda: [(torch.arange(6.0), 0.5)],
)

_TABLES: list[Tensor] = []


def keeps_table(x: Tensor) -> Tensor:
    """Turns each row by an angle from a table, which the first call creates for its length."""
    if not _TABLES:
        _TABLES.append(torch.arange(float(len(x))).cos())
    (table,) = _TABLES
    if len(x) > len(table):
        table = torch.nn.functional.pad(table, (0, len(x) - len(table)))
    return x * table[: len(x), None].to(x)


wrong(define("keeps_table", keeps_table, fake=like), "contracts.state", one)

# --------------------------------------------------------------------------------------------------
# Arguments and results that callers of PyTorch expect to work


def reversed_along(x: Tensor, dim: int) -> Tensor:
    return x.flip(1 if dim == 1 else 0)


wrong(
    define("reversed_along", reversed_along, fake=like),
    "values.negative_dim",
    lambda: [(torch.arange(6.0).view(2, 3), 1)],
)


@torch.library.custom_op("zoo::stock_inference_result", mutates_args=())
def stock_inference_result(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.cos()


stock_inference_result.register_fake(torch.empty_like)
wrong("zoo::stock_inference_result", "contracts.schema", one)


@torch.library.custom_op("zoo::stock_requires_grad", mutates_args=())
def stock_requires_grad(x: Tensor) -> Tensor:
    return x.detach().cos().requires_grad_(x.is_floating_point())


stock_requires_grad.register_fake(torch.empty_like)
wrong("zoo::stock_requires_grad", "contracts.schema", one)


def sums_in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().sum(0).to(x.dtype)


wrong(
    define("sums_in_bfloat16", sums_in_bfloat16, fake=lambda x: x.new_empty(x.shape[1:])),
    "dtypes.double",
    lambda: [(torch.arange(640.0).view(10, 64).cos(),)],
)
