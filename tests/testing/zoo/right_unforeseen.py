"""Correct operators that were written without seeing whether the checks pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.testing.zoo.specimen import define, floats_only, one, right, save

# --------------------------------------------------------------------------------------------------
# Tables, sorting, sampling


def rounded_to_steps(x: Tensor) -> Tensor:
    assert x.dtype in (torch.float16, torch.bfloat16, torch.float32), f"no kernel for {x.dtype}"
    return (x * 7).round() / 7


right(define("rounded_to_steps", rounded_to_steps, fake=torch.empty_like), one)


def interpolated(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
    """Interpolate linearly between `values` at the ascending `places`."""
    floats_only("interpolated", x, places, values)
    if places.shape != values.shape or places.dim() != 1 or places.shape[0] < 2:
        raise ValueError("interpolated takes as many values as places, and at least two")
    behind = torch.searchsorted(places.contiguous(), x.contiguous()).clamp(1, places.shape[0] - 1)
    left, right = places[behind - 1], places[behind]
    share = ((x - left) / (right - left)).clamp(0, 1)
    return values[behind - 1] + share * (values[behind] - values[behind - 1])


right(
    define("interpolated", interpolated),
    lambda: [(torch.tensor([[0.3, 1.7], [2.2, -1.0]]), torch.tensor([0.0, 1, 3]), torch.ones(3))],
)


def sorted_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    if not x.dim():
        raise ValueError("sorted_rows takes tensors with a dimension")
    values, places = x.sort(dim=-1, stable=True)
    return values.contiguous(), places.contiguous()


right(
    define("sorted_rows", sorted_rows),
    lambda: [(torch.tensor([[3.0, 1, 3, -2], [0, 0, 5, 5]]),)],
)


def sampled_image(x: Tensor, grid: Tensor) -> Tensor:
    floats_only("sampled_image", x, grid)
    return functional.grid_sample(x, grid, align_corners=False).contiguous()


right(
    define("sampled_image", sampled_image),
    lambda: [
        (
            torch.arange(24.0).view(1, 2, 3, 4).sin(),
            torch.linspace(-0.9, 0.83, 20).view(1, 2, 5, 2),
        )
    ],
)


def splatted(points: Tensor, weights: Tensor, height: int, width: int) -> Tensor:
    """Return an image in which each pixel is the sum of the weights of the points in it."""
    floats_only("splatted", points, weights)
    cells = (points * torch.tensor([height, width], device=points.device)).long()
    is_inside = (cells >= 0).all(-1) & (cells[:, 0] < height) & (cells[:, 1] < width)
    flat = (cells[:, 0] * width + cells[:, 1]).masked_fill(~is_inside, height * width)
    image = weights.new_zeros(height * width + 1)
    return image.index_add_(0, flat, weights)[:-1].view(height, width).clone()


right(
    define(
        "splatted",
        splatted,
        fake=lambda points, weights, height, width: weights.new_empty(height, width),
    ),
    lambda: [(torch.tensor([[0.1, 0.2], [0.5, 0.9], [0.55, 0.95]]), torch.ones(3), 4, 6)],
)

# --------------------------------------------------------------------------------------------------
# Linear algebra


def solved(lower: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(lower.tril(), b, upper=False).contiguous()


def _keep_solution(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output)


def _gradients_of_solution(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
    lower, x = ctx.saved_tensors
    back = torch.linalg.solve_triangular(lower.tril().mT, g, upper=True)
    return -(back @ x.mT).tril(), back


_solved = define("solved", solved)
_solved.register_autograd(_gradients_of_solution, setup_context=_keep_solution)
right(
    _solved,
    lambda: [
        (torch.tensor([[2.0, 9, 9], [1, 3, 9], [0.5, -1, 4]]), torch.arange(6.0).view(3, 2) + 1)
    ],
)


def singular_values(x: Tensor) -> Tensor:
    return torch.linalg.svdvals(x).contiguous()


right(
    define(
        "singular_values",
        singular_values,
        fake=lambda x: torch.empty(
            *x.shape[:-2],
            min(x.shape[-2:]),
            dtype=x.dtype.to_real() if x.dtype.is_complex else x.dtype,
            device=x.device,
        ),
    ),
    one,
)


def products_of_bytes(a: Tensor, b: Tensor, zero: int) -> Tensor:
    if a.dtype is not torch.int8 or b.dtype is not torch.int8:
        raise TypeError("products_of_bytes takes tensors of int8")
    return (a.int() - zero) @ b.int()


right(
    define("products_of_bytes", products_of_bytes),
    lambda: [
        (
            torch.tensor([[1, -2, 127], [-128, 5, 0]], dtype=torch.int8),
            torch.tensor([[3, 4], [-5, 6], [7, -128]], dtype=torch.int8),
            3,
        )
    ],
)

# --------------------------------------------------------------------------------------------------
# Signals and sequences


def hamming_window(size: int, periodic: bool = True) -> Tensor:
    """Return a Hamming window. None of the arguments is a tensor."""
    if size < 0:
        raise ValueError(f"size is {size}, and must not be negative")
    return torch.hamming_window(size, periodic, dtype=torch.float32)


right(
    define(
        "hamming_window",
        hamming_window,
        fake=lambda size, periodic=True: torch.empty(size, dtype=torch.float32),
    ),
    lambda: [(7,), (8, False)],
)


def spectrum(x: Tensor) -> Tensor:
    floats_only("spectrum", x)
    return torch.fft.fft(x).contiguous()


_spectrum = define("spectrum", spectrum)
_spectrum.register_autograd(lambda ctx, g: torch.fft.fft(g.conj()).conj().real)
right(_spectrum, one)


def recurrence(decay: Tensor, x: Tensor, start: Tensor) -> Tensor:
    floats_only("recurrence", decay, x, start)
    if decay.shape != x.shape or start.shape != x.shape[1:]:
        raise ValueError("recurrence takes a decay for each number of x, and a start for a row")
    state, states = start, []
    for row in range(x.shape[0]):
        state = decay[row] * state + x[row]
        states.append(state)
    return torch.stack([start, *states])[1:].clone()


def _keep_states(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output)


def _gradients_of_recurrence(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    decay, _, start, states = ctx.saved_tensors
    before = torch.cat([start.unsqueeze(0), states[:-1]])
    later, of_x = torch.zeros_like(start), []
    for row in reversed(range(g.shape[0])):
        later = g[row] + later
        of_x.append(later)
        later = later * decay[row]
    stacked = torch.stack(of_x[::-1]) if of_x else torch.zeros_like(g)
    return (stacked * before)[: len(g)], stacked, later


def _fake_recurrence(decay: Tensor, x: Tensor, start: Tensor) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(decay.dtype, x.dtype), start.dtype)
    return torch.empty(x.shape, dtype=dtype, device=x.device)


_recurrence = define("recurrence", recurrence, fake=_fake_recurrence)
_recurrence.register_autograd(_gradients_of_recurrence, setup_context=_keep_states)
right(
    _recurrence,
    lambda: [
        (
            torch.linspace(0.1, 0.9, 12).view(3, 4),
            torch.arange(12.0).view(3, 4).cos(),
            torch.ones(4),
        )
    ],
)


# --------------------------------------------------------------------------------------------------
# Kernels that accept more shapes than their gradient formula, and mixed dtypes under autocast


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    floats_only("affine", x, weight, bias)
    if len({x.dtype, weight.dtype, bias.dtype}) > 1:
        raise TypeError("affine takes tensors of one dtype")
    return (x @ weight.t() + bias).contiguous()


def _gradients_of_affine(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, weight, _ = ctx.saved_tensors
    return grad @ weight, grad.t() @ x, grad.sum(0)


_affine = define(
    "affine", affine, fake=lambda x, weight, bias: x.new_empty(x.shape[0], weight.shape[0])
)
_affine.register_autograd(_gradients_of_affine, setup_context=save)
right(
    _affine,
    lambda: [
        (
            torch.arange(6.0).view(2, 3).cos(),
            torch.arange(12.0).view(4, 3).sin(),
            torch.arange(4.0),
        )
    ],
)


def scores_and_total(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two dtypes under autocast: bfloat16 for the product, float32 for the logarithm."""
    floats_only("scores_and_total", q, k)
    scores = q @ k.t()
    return scores.contiguous(), scores.logsumexp(-1)


right(
    define("scores_and_total", scores_and_total),
    lambda: [(torch.arange(6.0).view(2, 3).cos(), torch.arange(12.0).view(4, 3).sin())],
)


def total_of_rows(x: Tensor, mask: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, which is -inf if the mask leaves no element."""
    floats_only("total_of_rows", x, mask)
    return (x + mask).logsumexp(-1)


def _gradients_of_total(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, mask = ctx.saved_tensors
    slope = (x + mask).softmax(-1) * grad.unsqueeze(-1)
    return slope.sum_to_size(x.shape), slope.sum_to_size(mask.shape)


_total = define("total_of_rows", total_of_rows)
_total.register_autograd(_gradients_of_total, setup_context=save)
right(_total, lambda: [(torch.arange(6.0).view(2, 3).cos(), torch.zeros(2, 1))])


def joined(x: Tensor, y: Tensor, dim: int) -> Tensor:
    """A negative dimension is one of the result, which has one more than the arguments."""
    return torch.stack([x, y], dim)


right(define("joined", joined), lambda: [(torch.ones(2, 3), torch.zeros(2, 3), 1)])


_COSINES: dict[int, Tensor] = {}


def turned_by_table(x: Tensor) -> Tensor:
    """Keeps a table between calls, which depends only on the number of rows."""
    floats_only("turned_by_table", x)
    if len(x) not in _COSINES:
        _COSINES[len(x)] = torch.arange(float(len(x)), dtype=torch.double).cos()
    return x * _COSINES[len(x)].to(x).view(-1, *[1] * (x.dim() - 1))


right(
    define("turned_by_table", turned_by_table, fake=torch.empty_like),
    lambda: [(torch.arange(6.0).view(2, 3).sin(),)],
)


def in_eighths(x: Tensor) -> Tensor:
    """Bfloat16 can represent the results, because they are multiples of 1/8 below 32."""
    floats_only("in_eighths", x)
    return (x * 8).round() / 8


right(
    define("in_eighths", in_eighths, fake=torch.empty_like),
    lambda: [(torch.arange(-90.0, 90.0).mul(0.17),)],
)


def rows_replaced(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """The gradients are wrong if an index repeats, as those of `torch.scatter`."""
    result = x.clone()
    result[index] = rows
    return result


def _gradients_of_replaced(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    (index,) = ctx.saved_tensors
    return grad.index_fill(0, index, 0), None, grad[index]


_replaced = define("rows_replaced", rows_replaced)
_replaced.register_autograd(
    _gradients_of_replaced,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
right(
    _replaced,
    lambda: [(torch.ones(6, 3), torch.tensor([4, 2, 5]), torch.arange(9.0).view(3, 3).cos())],
)


def centered(x: Tensor) -> Tensor:
    """The mean of the columns is the same for 2n of them, but not for 2n + 1."""
    floats_only("centered", x)
    return x - x.mean(-1, keepdim=True)


right(define("centered", centered), lambda: [(torch.arange(6.0).view(2, 3).cos(),)])
