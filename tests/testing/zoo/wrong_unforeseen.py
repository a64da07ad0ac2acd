"""Wrong operators that were written before the checks ran on them."""

from __future__ import annotations

import ctypes
import platform
import threading
from typing import Any

import torch
from torch import Tensor

from tests._support.releases import of_form
from tests.testing.zoo.specimen import define, floats_only, like, one, two, wrong

_C = ctypes.CDLL(None)
_UPWARD = 0x400000 if platform.machine() in ("aarch64", "arm64") else 0x800  # FE_UPWARD

# --------------------------------------------------------------------------------------------------
# Memory


def frees_its_copy(x: Tensor) -> Tensor:
    """The address of a copy that nothing holds any more, where the argument is not contiguous."""
    address = x.contiguous().data_ptr()
    result = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    ctypes.memmove(result.data_ptr(), address, result.nbytes)
    return result


wrong(define("frees_its_copy", frees_its_copy, fake=like), "memory.transposed", one)


def drops_some(x: Tensor, p: float) -> Tensor:
    """With nothing to drop, it is done early, and returns its argument."""
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
    """The name is another tensor now, and the argument is what it was."""
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
# The process, and the one after it


def rounds_upwards(x: Tensor) -> Tensor:
    """Bounds of intervals are rounded away from each other, and then everything is."""
    floats_only("rounds_upwards", x)
    _C.fesetround(_UPWARD)
    return x.contiguous() + 1


wrong(define("rounds_upwards", rounds_upwards, fake=like), "contracts.process", one)


# --------------------------------------------------------------------------------------------------
# Dtypes and sizes


def zeros_where_it_fails(x: Tensor) -> Tensor:
    """Its library has no kernel for numbers of 16 bits, which nobody gets to know."""
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
    """The last of an odd number is a pair by itself, of which the fake kernel does not know."""
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
# Of a row of zeros, the length is 0, and its gradient 0/0.
_lengths.register_autograd(
    lambda ctx, g: (g / ctx.saved_tensors[1]).unsqueeze(-1) * ctx.saved_tensors[0],
    setup_context=_keep,
)
wrong(_lengths, "subsystems.gradcheck", one)


def _keep_once(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.is_first = True


def _gradient_once(ctx: Any, g: Tensor) -> Tensor:
    """Returns zeros if the graph runs backward again."""
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
    """Assumes that backward runs in the thread of the forward."""
    return g * ctx.saved_tensors[0] * getattr(_HANDLES, "factor", 0.0)


_thread = define("remembers_in_its_thread", lambda x: x * x, schema="(Tensor x) -> Tensor")
_thread.register_autograd(_gradient_of_thread, setup_context=_with_handle)
wrong(_thread, "subsystems.threads", one)
