"""Correct operators with several kernels, for which no check may fail.

Unlike the reference kernel, a provider may support few calls or none, run on a different device,
round differently, add in a different order, or draw different random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tests.testing.zoo.specimen import (
    define,
    one,
    positive,
    product,
    product_gradients,
    right,
    rows_and_weights,
    save,
    two,
)


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    if not x.is_floating_point() or not weight.is_floating_point():
        raise TypeError(f"rms_norm takes floating-point tensors, got {x.dtype}, {weight.dtype}")
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).contiguous()


def takes_rows(x: Tensor, weight: Tensor, eps: float) -> bool:
    has_rows = x.dim() > 0 and x.dtype == weight.dtype and x.shape[-1:] == weight.shape
    return has_rows and x.is_floating_point()


def rounds_once(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    wide = x.double()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight.double()).to(x.dtype).contiguous()


def of_pytorch(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    return torch.nn.functional.rms_norm(x, weight.shape, weight, eps).contiguous()


def row_by_row(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    rows = [rounds_once(row, weight, eps) for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).view(x.shape)


def takes_some_rows(x: Tensor, weight: Tensor, eps: float) -> bool:
    return takes_rows(x, weight, eps) and x.numel() > 0 and x.numel() // x.shape[-1] <= 300


def takes_little(x: Tensor, weight: Tensor, eps: float) -> bool:
    return takes_rows(x, weight, eps) and x.dim() == 2 and x.shape[0] == 1 and x.is_contiguous()


_norm = define("provided_rms_norm", rms_norm)
for name, kernel, supports, is_invariant in (
    ("once", rounds_once, takes_rows, False),
    ("pytorch", of_pytorch, takes_rows, False),
    ("rows", row_by_row, takes_some_rows, True),
    ("little", rounds_once, takes_little, True),
    ("nothing", row_by_row, lambda x, weight, eps: False, True),
):
    _norm.register_kernel(
        "cpu", kernel, provider=name, supports=supports, batch_invariant=is_invariant
    )
_norm.set_priority(["little", "rows"])


def _is_broken() -> bool:
    raise RuntimeError("no compiler")


def never_runs(x: Tensor, weight: Tensor, eps: float = 1e-2) -> Tensor:
    raise AssertionError("a kernel that cannot run here")


_norm.register_kernel("cuda", never_runs, provider="device")
_norm.register_kernel("cpu", never_runs, provider="unsupported", supported=False)
_norm.register_kernel("cpu", never_runs, provider="broken", supported=_is_broken)
right(_norm, rows_and_weights)

# --------------------------------------------------------------------------------------------------
# Numbers


def in_bfloat16(x: Tensor) -> Tensor:
    return x.bfloat16().sin().to(x.dtype)


def is_float(x: Tensor) -> bool:
    return x.is_floating_point()


_loose = define("provided_loose", lambda x: x.sin(), schema="(Tensor x) -> Tensor")
_loose.register_kernel(
    "cpu",
    in_bfloat16,
    provider="fast",
    supports=is_float,
    tolerance=dict.fromkeys(
        (torch.float64, torch.float32, torch.float16, torch.bfloat16), (2e-2, 2e-2)
    ),
)
right(_loose, one)

_chance = random.Random(0)


def row_sums(x: Tensor) -> Tensor:
    return x.sum(-1)


def in_some_order(x: Tensor) -> Tensor:
    return x[..., torch.tensor(_chance.sample(range(x.shape[-1]), x.shape[-1]))].sum(-1)


def has_columns(x: Tensor) -> bool:
    return x.dim() > 0 and 0 < x.shape[-1] < 2000 and x.is_floating_point()


_sums = define("provided_sums", row_sums)
_sums.register_kernel(
    "cpu", in_some_order, provider="chance", supports=has_columns, deterministic=False
)
_sums.register_kernel(
    "cpu", lambda x: x.flip(-1).sum(-1), provider="backwards", supports=has_columns
)
right(_sums, lambda: [(torch.rand(3, 37, generator=torch.Generator().manual_seed(0)),)])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


def by_elements(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply matrices, and add the products in the same order for every batch size."""
    total = torch.zeros(x.shape[0], weight.shape[1], dtype=x.dtype)
    for k in range(x.shape[1]):
        total = total + x[:, k, None] * weight[k]
    return total


def are_small_matrices(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dim() == weight.dim() == 2
        and x.dtype == weight.dtype
        and x.dtype in (torch.float32, torch.float64)
        and x.shape[1] == weight.shape[0]
        and x.shape[1] <= 100
    )


_linear = define("provided_linear", linear)
_linear.register_kernel(
    "cpu", by_elements, provider="elements", supports=are_small_matrices, batch_invariant=True
)
right(_linear, lambda: [(torch.randn(4, 4), torch.randn(4, 4))])

# --------------------------------------------------------------------------------------------------
# Configurations, and arguments that `supports` may read


def in_tiles(x: Tensor, factor: float = 2.0, *, mode: str = "all", tile: int) -> Tensor:
    return torch.cat([part * factor for part in x.flatten().split(tile)]).view(x.shape)


def takes_all(x: Tensor, factor: float, *, mode: str) -> bool:
    return mode == "all" and factor > 0 and x.stride()[-1:] in ((1,), ())


def multiplied(x: Tensor, factor: float = 2.0, *, mode: str = "all") -> Tensor:
    return (x * factor).contiguous()


_tiles = define("provided_tiles", multiplied)
_tiles.register_kernel(
    "cpu",
    in_tiles,
    provider="tiles",
    supports=takes_all,
    configs=[{"tile": 64}, {"tile": 1000}, {"tile": 7}],
    batch_invariant=True,
)
right(_tiles, lambda: [(torch.randn(3, 4),), ((torch.randn(5),), {"mode": "none"})])

# --------------------------------------------------------------------------------------------------
# Arguments and results of all kinds


def scaled_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def copied_(x: Tensor, factor: float) -> None:
    x.copy_(x * factor)


_in_place = define("provided_in_place", scaled_, mutates_args={"x"})
_in_place.register_kernel("cpu", copied_, provider="copy")
right(_in_place, lambda: [(torch.randn(3, 4), 3.0)])


def sums(xs: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.sum() for x in xs])


def are_three(xs: Sequence[Tensor]) -> bool:
    return len(xs) == 3 and all(x.is_floating_point() for x in xs)


_lists = define("provided_lists", sums)
_lists.register_kernel(
    "cpu",
    lambda xs: torch.cat([x.mean()[None] * x.numel() if x.numel() else x.sum()[None] for x in xs]),
    provider="means",
    supports=are_three,
)
right(_lists, lambda: [([torch.randn(2), torch.randn(3), torch.randn(4)],), ([torch.randn(2)],)])


class Ends(NamedTuple):
    low: Tensor
    high: Tensor


def ends(x: Tensor) -> Ends:
    return Ends(x.amin(-1), x.amax(-1))


def ends_of_sorted(x: Tensor) -> Ends:
    values = x.sort(-1).values
    low, high = (values[..., place].clone() for place in (0, -1))
    # If a row contains NaN, the reference `amin` returns NaN, but `sort` places NaN last.
    return Ends(torch.where(high.isnan(), high, low) if x.is_floating_point() else low, high)


_structure = define("provided_structure", ends)
_structure.register_kernel(
    "cpu", ends_of_sorted, provider="sorted", supports=lambda x: x.dim() > 0 and x.shape[-1] > 0
)
right(_structure, one)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.mean(-1), x.square().mean(-1)


_two = define("provided_two", moments)
_two.register_kernel(
    "cpu",
    lambda x: (x.sum(-1) / x.shape[-1], x.square().sum(-1) / x.shape[-1]),
    provider="sums",
    supports=lambda x: x.dim() > 0 and x.is_floating_point() and x.shape[-1] > 0,
)
right(_two, one)


def dropped(x: Tensor) -> Tensor:
    return x * (torch.rand(x.shape, device=x.device) > 0.5)


_random = define("provided_random", dropped, tags=torch.Tag.nondeterministic_seeded)
_random.register_kernel(
    "cpu", lambda x: x * torch.randint(0, 2, x.shape).bool(), provider="integers"
)
right(_random, one)

# --------------------------------------------------------------------------------------------------
# Compilers and gradients

_inlined = define("provided_inlined", product, compile="inline")
_inlined.register_kernel(
    "cpu", torch.mul, provider="pytorch", supports=lambda x, y: x.dim() == y.dim()
)
_inlined.register_autograd(product_gradients, setup_context=save)
right(_inlined, two)


def cubed_backward(grad: Tensor, x: Tensor) -> Tensor:
    return 3 * grad * x**2


def is_float_too(grad: Tensor, x: Tensor) -> bool:
    return x.is_floating_point()


_backward = define("provided_cubed_backward", cubed_backward)
_backward.register_kernel(
    "cpu", lambda grad, x: (grad * x) * (3 * x), provider="fast", supports=is_float_too
)
right(_backward, lambda: [(torch.ones(3, 4), torch.rand(3, 4))])
_cubed = define("provided_cubed", lambda x: x**3, schema="(Tensor x) -> Tensor")
_cubed.register_kernel("cpu", lambda x: x * x * x, provider="fast", supports=is_float)
_cubed.register_kernel("cpu", lambda x: x.pow(3), provider="other")
_cubed.register_autograd(lambda ctx, grad: _backward(grad, *ctx.saved_tensors), setup_context=save)
_cubed.register_vmap(lambda info, dims, x: (_cubed(x), dims[0]))
right(_cubed, positive)
