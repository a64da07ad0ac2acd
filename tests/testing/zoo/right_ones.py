"""Correct operators of many kinds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import torchop
from tests._support.releases import of_form
from tests.testing.zoo.specimen import (
    define,
    image,
    one,
    positive,
    product,
    product_gradients,
    right,
    rows_and_weights,
    save,
    two,
)

_product = define("product", product)
_product.register_autograd(product_gradients, setup_context=save)
_product.register_vmap("sequential")
right(_product, two)


def numpy_sin(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        raise TypeError(f"numpy_sin takes floating-point tensors, got {x.dtype}")
    return torch.from_numpy(np.sin(x.contiguous().numpy()))


_sin = define(
    "numpy_sin",
    numpy_sin,
    fake=lambda x: torch.empty(x.shape, dtype=x.dtype),
    device_types="cpu",
)
_sin.register_autograd(lambda ctx, g: g * ctx.saved_tensors[0].cos(), setup_context=save)
_sin.register_jvp(
    lambda ctx, t: t * ctx.saved_tensors[0].cos(),
    setup_context=lambda ctx, inputs, output: ctx.save_for_forward(*inputs),
)
_sin.register_vmap(lambda info, dims, x: (_sin(x), dims[0]))


def _dtypes_of_numpy() -> list[Any]:
    return [(torch.tensor([[0.5, -1.0], [2.0, 0.25]]),)]


right(_sin, _dtypes_of_numpy)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(torch.exp(-x.abs())) + x.clamp(min=0)


_softplus = define("softplus", softplus)
_softplus.derive_autograd()
right(_softplus, one)


def row_norms(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


def _gradient_of_norms(ctx: Any, g: Tensor) -> Tensor:
    (x,) = ctx.saved_tensors
    norms = row_norms(x)
    return x * (g / norms.masked_fill(norms == 0, 1.0)).unsqueeze(-1)


_norms = define("row_norms", row_norms)
_norms.register_autograd(_gradient_of_norms, setup_context=save)
_norms.register_sharding("... d -> ...")
right(_norms, positive)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


right(define("linear", linear), rows_and_weights)


def scale_rows(x: Tensor, weights: Tensor, scale: float = 2.0) -> Tensor:
    return x * weights * scale


_scale = define("scale_rows", scale_rows)
_scale.register_autograd(
    lambda ctx, g: (
        (g * ctx.saved_tensors[1] * ctx.scale).sum_to_size(ctx.saved_tensors[0].shape),
        (g * ctx.saved_tensors[0] * ctx.scale).sum_to_size(ctx.saved_tensors[1].shape),
        None,
    ),
    setup_context=lambda ctx, inputs, output: (
        ctx.save_for_backward(*inputs[:2]),
        setattr(ctx, "scale", inputs[2]),
    )[0],
)
right(_scale, rows_and_weights)


def min_and_max(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amin(-1), x.amax(-1)


right(define("min_and_max", min_and_max), one)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.is_floating_point():
        raise TypeError(f"quantized takes floating-point tensors, got {x.dtype}")
    scale = x.abs().sum() + 1
    return (x / scale * 100).round().to(torch.int8), scale


_quantized = define("quantized", quantized)
_quantized.register_autograd(lambda ctx, _, g: g * ctx.saved_tensors[0].sign(), setup_context=save)
right(_quantized, one)


def concatenated(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(xs), -1)


right(define("concatenated", concatenated), lambda: [([torch.ones(2, 3), torch.zeros(2, 1)],)])


def split_in_two(x: Tensor) -> list[Tensor]:
    half = x.shape[-1] // 2
    return [x[..., :half].clone(), x[..., half:].clone()]


right(define("split_in_two", split_in_two), one)


def biased(x: Tensor, bias: Tensor | None = None) -> Tensor:
    return x.clone() if bias is None else x + bias


right(define("biased", biased), lambda: [(torch.ones(2, 3),), (torch.ones(2, 3), torch.ones(3))])


def add_into(x: Tensor, y: Tensor) -> None:
    x.add_(y)


right(define("add_into", add_into, mutates_args={"x"}), two)


def zero_negatives_(x: Tensor) -> Tensor:
    return x.clamp_(min=0)


right(
    define(
        "zero_negatives_",
        zero_negatives_,
        mutates_args={"x"},
        fake=None,
        **of_form("inplace", "(Tensor(a!) x) -> Tensor(a!)"),
    ),
    one,
)


def scaled_out(x: Tensor, factor: float, *, out: Tensor) -> Tensor:
    if out.shape != x.shape:
        raise ValueError(f"out has shape {[*out.shape]} and not {[*x.shape]}")
    return torch.mul(x, factor, out=out)


right(
    define(
        "scaled_out",
        scaled_out,
        mutates_args={"out"},
        fake=None,
        **of_form("out", "(Tensor x, float factor, *, Tensor(a!) out) -> Tensor(a!)"),
    ),
    lambda: [((torch.ones(2, 3), 2.0), {"out": torch.empty(2, 3)})],
)


def picked(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(0, index)


right(define("picked", picked), lambda: [(torch.randn(4, 3), torch.tensor([2, 0, 1, 1, 3]))])


def noisy(x: Tensor) -> Tensor:
    return x + torch.randn(x.shape, dtype=x.dtype)


right(
    define(
        "noisy",
        noisy,
        tags=(torch.Tag.nondeterministic_seeded,),
        fake=lambda x: torch.empty_like(x),
    ),
    lambda: [(torch.zeros(3),)],
)


def blurred(x: Tensor) -> Tensor:
    return torch.nn.functional.avg_pool2d(x, 2, stride=1)


right(define("blurred", blurred), image)


def magnitude(x: Tensor) -> Tensor:
    return (x.real.square() + x.imag.square()).sqrt()


right(define("magnitude", magnitude), lambda: [(torch.tensor([1 + 2j, 3 - 1j]),)])


def masked(x: Tensor, mask: Tensor, value: float) -> Tensor:
    return torch.where(mask, value, x)


right(
    define("masked", masked),
    lambda: [(torch.randn(2, 3), torch.tensor([[True, False, True], [False, True, False]]), 0.5)],
)


def count_positive(x: Tensor) -> Tensor:
    return (x > 0).sum(-1)


right(define("count_positive", count_positive), one)


def where_positive(x: Tensor) -> Tensor:
    return (x > 0).nonzero().contiguous()


def _unknown_rows(x: Tensor) -> Tensor:
    return x.new_empty([torchop.get_ctx().new_dynamic_size(), x.dim()], dtype=torch.long)


right(define("where_positive", where_positive, fake=_unknown_rows), one)


def cumulative(x: Tensor, dim: int) -> Tensor:
    return x.contiguous().cumsum(dim)


right(
    define(
        "cumulative", cumulative, fake=lambda x, dim: torch.empty_like(x.contiguous().cumsum(dim))
    ),
    lambda: [(torch.randn(3, 4), 1), (torch.randn(5), 0)],
)


def outer(x: Tensor, y: Tensor) -> Tensor:
    return x[:, None] * y[None, :]


_outer = define("outer", outer)
_outer.register_autograd(
    lambda ctx, g: (g @ ctx.saved_tensors[1], g.t() @ ctx.saved_tensors[0]), setup_context=save
)
_outer.register_vmap("sequential")
right(_outer, lambda: [(torch.randn(3), torch.randn(4))])


# --------------------------------------------------------------------------------------------------
# Operators that seem to change the metadata of an argument, but do not


def add_by_flat_alias(state: Tensor, new: Tensor) -> None:
    """Changes the shape of an alias, and not of the argument itself."""
    state.detach().unsqueeze_(0).add_(new)


def _nothing(*args: Any) -> None:
    return None


right(define("add_by_flat_alias", add_by_flat_alias, mutates_args=("state",), fake=_nothing), two)


def add_resizing_out(x: Tensor, y: Tensor, *, out: Tensor) -> Tensor:
    return torch.add(x, y, out=out)


right(
    define(
        "add_resizing_out",
        add_resizing_out,
        mutates_args=("out",),
        fake=None,
        **of_form("out", "(Tensor x, Tensor y, *, Tensor(a!) out) -> Tensor(a!)"),
    ),
    lambda: [(pair, {"out": torch.empty(3, 4)}) for pair in two()],
)
