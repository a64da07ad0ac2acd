"""Faulty operators that were written without seeing whether a check reports them."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests._support.releases import of_form
from tests.testing.zoo.specimen import define, floats_only, like, one, save, two, wrong

_C = ctypes.CDLL(None)
_UPWARD = 0x400000 if platform.machine() in ("aarch64", "arm64") else 0x800  # FE_UPWARD

# --------------------------------------------------------------------------------------------------
# Memory


def frees_its_copy(x: Tensor) -> Tensor:
    """If the argument is not contiguous, reads from a contiguous copy that has been freed."""
    address = x.contiguous().data_ptr()
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ctypes.memmove(result.data_ptr(), address, result.nbytes)
    return result


wrong(define("frees_its_copy", frees_its_copy, fake=like), "memory.transposed", one)


def drops_some(x: Tensor, p: float) -> Tensor:
    """Returns its argument itself if p is 0, although a result must be a new tensor."""
    if p == 0.0:
        return x
    every = torch.arange(x.numel(), device=x.device).view(x.shape)
    return x * (every % round(1 / p) > 0)


wrong(
    define("drops_some", drops_some, fake=lambda x, p: torch.empty_like(x)),
    "contracts.schema",
    lambda: [(torch.arange(12.0).view(3, 4), 0.25)],
)


def rebinds_(x: Tensor, y: Tensor) -> Tensor:
    """Assigns to the variable `x`, which leaves the argument unchanged, unlike `x += y`."""
    x = x + y
    return x


wrong(
    define(
        "rebinds_",
        rebinds_,
        mutates_args={"x"},
        fake=None,
        **of_form("inplace", "(Tensor(a!) x, Tensor y) -> Tensor(a!)"),
    ),
    "contracts.schema",
    two,
)

# --------------------------------------------------------------------------------------------------
# State of the process


def rounds_upwards(x: Tensor) -> Tensor:
    """Changes the rounding mode of the processor, and does not restore it."""
    floats_only("rounds_upwards", x)
    _C.fesetround(_UPWARD)
    return x.contiguous() + 1


wrong(define("rounds_upwards", rounds_upwards, fake=like), "contracts.process", one)


# --------------------------------------------------------------------------------------------------
# Dtypes and sizes


def zeros_where_it_fails(x: Tensor) -> Tensor:
    """Returns zeros if there is no kernel for the dtype, instead of raising an error."""
    floats_only("zeros_where_it_fails", x)
    try:
        if x.itemsize < 4:
            raise NotImplementedError("not for numbers of 16 bits")
        return (x.sin() * 2).contiguous()
    except NotImplementedError:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)


wrong(
    define("zeros_where_it_fails", zeros_where_it_fails, fake=like),
    "dtypes.numbers",
    one,
)


def pools_pairs(x: Tensor) -> Tensor:
    """Has a fake kernel whose result is too short if the rows have an odd length."""
    pairs = torch.nn.functional.pad(x, (0, x.shape[1] % 2), value=float("-inf"))
    return pairs.unflatten(1, (-1, 2)).amax(2)


wrong(
    define("pools_pairs", pools_pairs, fake=lambda x: x.new_empty(x.shape[0], x.shape[1] // 2)),
    "subsystems.fake",
    one,
)

# --------------------------------------------------------------------------------------------------
# Gradients


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0], output)


def lengths_of_rows(x: Tensor) -> Tensor:
    return x.square().sum(-1).sqrt()


_lengths = define("lengths_of_rows", lengths_of_rows)
# For a row of zeros, this formula computes 0/0, so the gradient is NaN.
_lengths.register_autograd(
    lambda ctx, g: (g / ctx.saved_tensors[1]).unsqueeze(-1) * ctx.saved_tensors[0],
    setup_context=_keep,
)
wrong(_lengths, "subsystems.gradcheck", one)


def _keep_once(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.is_first = True


def _gradient_once(ctx: Any, g: Tensor) -> Tensor:
    """Returns zeros if backward runs a second time through the same graph."""
    if not ctx.is_first:
        return torch.zeros_like(g)
    ctx.is_first = False
    return g * ctx.saved_tensors[0].cos()


_once = define("asked_once", lambda x: x.sin(), schema="(Tensor x) -> Tensor")
_once.register_autograd(_gradient_once, setup_context=_keep_once)
wrong(_once, "subsystems.gradcheck", one)

_HANDLES = threading.local()


def _with_handle(ctx: Any, inputs: Any, output: Any) -> None:
    _HANDLES.factor = 2.0
    ctx.save_for_backward(inputs[0])


def _gradient_of_thread(ctx: Any, g: Tensor) -> Tensor:
    """Reads a thread-local value, which is missing if backward runs in a different thread."""
    return g * ctx.saved_tensors[0] * getattr(_HANDLES, "factor", 0.0)


_thread = define("remembers_in_its_thread", lambda x: x * x, schema="(Tensor x) -> Tensor")
_thread.register_autograd(_gradient_of_thread, setup_context=_with_handle)
wrong(_thread, "subsystems.threads", one)

# --------------------------------------------------------------------------------------------------
# Arguments with defaults, lists of unequal tensors, and tensors that require grad


def scaled_sum(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    floats_only("scaled_sum", x, y)
    return x + alpha * y.sin()


def _gradients_without_alpha(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    """Ignores `alpha`, so the gradients are correct only for the default, 1."""
    x, y = ctx.saved_tensors
    return grad.sum_to_size(x.shape), (grad * y.cos()).sum_to_size(y.shape), None


_scaled_sum = define("forgets_alpha", scaled_sum)
_scaled_sum.register_autograd(_gradients_without_alpha, setup_context=save)
wrong(_scaled_sum, "subsystems.gradcheck", two)


def _as_long_as_the_first(xs: Sequence[Tensor]) -> Tensor:
    """A fake kernel that is correct only if all tensors have the same length."""
    return xs[0].new_empty(len(xs) * xs[0].shape[0], *xs[0].shape[1:])


def joined(xs: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(xs))


wrong(
    define("fake_of_equal_lengths", joined, fake=_as_long_as_the_first),
    "subsystems.fake",
    lambda: [([torch.ones(2, 3), torch.zeros(2, 3)],)],
)


def halves_in_training(x: Tensor) -> Tensor:
    """Uses `requires_grad` as if it were a flag for training mode."""
    floats_only("halves_in_training", x)
    return torch.mul(x, 0.5 if x.requires_grad else 1.0).contiguous()


_halves = define("halves_in_training", halves_in_training, fake=like)
_halves.register_autograd(lambda ctx, grad: grad / 2)
wrong(_halves, "subsystems.inference_mode", one)


def _clears_negatives(ctx: Any, grad: Tensor) -> Tensor:
    """Writes to the incoming gradient, which other nodes may also read."""
    return grad.masked_fill_(ctx.saved_tensors[0] < 0, 0)


_relu = define("relu_clears_its_gradient", lambda x: x.relu(), schema="(Tensor x) -> Tensor")
_relu.register_autograd(_clears_negatives, setup_context=save)
wrong(_relu, "subsystems.saved", one)


def seeded_noise(x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return x + torch.rand(x.shape, dtype=x.dtype, device=x.device)


wrong(
    define("seeds_the_process", seeded_noise, tags=torch.Tag.nondeterministic_seeded),
    "contracts.repeated",
    lambda: [(torch.ones(3, 4), 7)],
)


def rows_taken(x: Tensor, index: Tensor) -> Tensor:
    return x[index]


def _keep_index(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.shape = inputs[0].shape
    ctx.save_for_backward(inputs[1])


def _gradient_of_last(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    """Overwrite, instead of add, the gradients of a row that was taken several times."""
    result = grad.new_zeros(ctx.shape)
    result[ctx.saved_tensors[0]] = grad
    return result, None


_taken = define("rows_taken", rows_taken)
_taken.register_autograd(_gradient_of_last, setup_context=_keep_index)
wrong(
    _taken,
    "subsystems.gradcheck",
    lambda: [(torch.arange(18.0).view(6, 3).cos(), torch.tensor([0, 2, 5]))],
)


def first_columns(x: Tensor) -> Tensor:
    """Leaves zeros in the columns after the first block."""
    result = torch.zeros_like(x)
    result[..., :128] = x[..., :128].cos()
    return result


wrong(
    define("first_columns", first_columns, fake=torch.empty_like),
    "memory.blocks",
    lambda: [(torch.arange(6.0).view(2, 3),)],
)


def row_means(x: Tensor) -> Tensor:
    return x.mean(1)


_means = define("row_means", row_means)
_means.register_autograd(
    lambda ctx, grad: grad[:, None].expand(ctx.shape) / ctx.shape[0],  # should be shape[1]
    setup_context=lambda ctx, inputs, output: setattr(ctx, "shape", inputs[0].shape),
)
wrong(_means, "subsystems.gradcheck", lambda: [(torch.arange(9.0).view(3, 3).cos(),)])


def columns_described(x: Tensor) -> Tensor:
    return x.sum(0)


wrong(
    define("columns_described", columns_described, fake=lambda x: x.new_empty(x.shape[0])),
    "subsystems.fake",
    lambda: [(torch.arange(9.0).view(3, 3),)],
)
