"""More correct kernels that were written without running the checks: types, lists, C."""

from __future__ import annotations

import ctypes
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import torchop
from tests.testing.zoo.specimen import define, floats_only, like, one, right, save

_MATH = ctypes.CDLL(None)
_MATH.erf.restype = ctypes.c_double
_MATH.erf.argtypes = (ctypes.c_double,)

# --------------------------------------------------------------------------------------------------
# Complex numbers and integers


def phases_turned(z: Tensor, phase: Tensor) -> Tensor:
    if not z.is_complex() or not phase.is_complex():
        raise TypeError("phases_turned takes complex tensors")
    return z * phase


_phases = define("phases_turned", phases_turned)
_phases.register_autograd(
    lambda ctx, grad: (grad * ctx.saved_tensors[1].conj(), grad * ctx.saved_tensors[0].conj()),
    setup_context=save,
)
_phases.register_vmap(lambda info, dims, z, p: _batched_phases(dims, z, p))


def _batched_phases(dims: Any, z: Tensor, phase: Tensor) -> Any:
    z, phase = (t if d is None else t.movedim(d, -1) for t, d in zip((z, phase), dims, strict=True))
    z = z.unsqueeze(-1) if dims[0] is None else z
    phase = phase.unsqueeze(-1) if dims[1] is None else phase
    return z * phase, -1


right(_phases, lambda: [(torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([0.6 + 0.8j, 1j]))])


def bits_set(x: Tensor) -> Tensor:
    if x.is_floating_point() or x.is_complex() or x.dtype is torch.bool:
        raise TypeError("bits_set takes integers")
    values = np.ascontiguousarray(x.detach().numpy())
    bits = np.unpackbits(values.view(np.uint8).reshape(*x.shape, x.itemsize), axis=-1)
    return torch.from_numpy(bits.sum(-1, dtype=np.int64).reshape(x.shape))


right(
    define("bits_set", bits_set, fake=lambda x: like(x).to(torch.int64)),
    lambda: [(torch.tensor([[3, -7, 2**40]]),)],
)


def mixed_hash(x: Tensor, seed: int) -> Tensor:
    """Hash integers with products that overflow on purpose."""
    if x.dtype is not torch.int64:
        raise TypeError("mixed_hash takes int64")
    if not 0 <= seed < 2**32:
        raise ValueError(f"a seed has 32 bits, got {seed}")
    x = x ^ seed
    for factor, shift in ((-49064778989728563, 33), (-4265267296055464877, 29)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ (x >> 32)).contiguous()


right(
    define("mixed_hash", mixed_hash, fake=lambda x, seed: like(x)),
    lambda: [(torch.tensor([[3, -7, 2**40]]), 11)],
)

# --------------------------------------------------------------------------------------------------
# Lists, structures, residuals, C


def adam_step(
    parameters: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor], step: int
) -> None:
    if step < 1:
        raise ValueError(f"the first step is 1, got {step}")
    for parameter, grad, mean in zip(parameters, grads, means, strict=True):
        mean.lerp_(grad, 0.1)
        parameter.sub_(mean / (1 - 0.9**step), alpha=0.01)


right(
    define(
        "adam_step",
        adam_step,
        mutates_args={"parameters", "means"},
        fake=lambda *args: None,
    ),
    lambda: [
        (
            [torch.ones(2), torch.zeros(3)],
            [torch.ones(2), torch.ones(3)],
            [torch.zeros(2), torch.ones(3)],
            2,
        )
    ],
)


@dataclasses.dataclass(frozen=True)
class Target:
    height: int
    width: int
    mode: Literal["nearest", "mean"] = "nearest"


def image_resized(image: Tensor, target: Target) -> Tensor:
    if target.height < 1 or target.width < 1 or min(image.shape[-2:]) < 1:
        raise ValueError("an image has at least one row and one column")
    if target.mode == "mean":
        floats_only("image_resized", image)
        result = image.mean((-2, -1), keepdim=True)
        return result.repeat(*[1] * (image.dim() - 2), target.height, target.width)
    rows = torch.arange(target.height) * image.shape[-2] // target.height
    columns = torch.arange(target.width) * image.shape[-1] // target.width
    return image[..., rows, :][..., columns].contiguous()


right(
    define(
        "image_resized",
        image_resized,
        fake=lambda image, target: image.new_empty(*image.shape[:-2], target.height, target.width),
    ),
    lambda: [
        (torch.arange(12.0).view(3, 4), Target(2, 5)),
        (torch.arange(24.0).view(2, 3, 4), Target(1, 2, "mean")),
    ],
)


def gated(x: Tensor) -> Tensor:
    """Return x * sigmoid(x). The sigmoid is a residual, which the backward uses."""
    floats_only("gated", x)
    gate = x.contiguous().sigmoid()
    if not torchop.records_gradient():
        return gate.mul(x).contiguous()
    return torchop.residuals(gate.mul(x).contiguous(), gate)


_gated = torchop.custom_op("zoo::gated", gated, mutates_args=(), residuals={"gate": Tensor})
_gated.register_fake(lambda x: torchop.residuals(like(x), like(x)))


def _gradient_of_gate(ctx: Any, grad: Tensor) -> Tensor:
    x, gate = ctx.saved_tensors
    if torch.is_grad_enabled():
        gate = x.sigmoid()
    return grad * gate * (1 + x * (1 - gate))


_gated.register_autograd(
    _gradient_of_gate,
    setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(
        *inputs, residuals.gate
    ),
)
right(_gated, one)


def error_function(x: Tensor) -> Tensor:
    floats_only("error_function", x)
    values = [_MATH.erf(value) for value in x.flatten().tolist()]
    return torch.tensor(values, dtype=torch.float64).to(x.dtype).view(x.shape)


_error = define("error_function", error_function, fake=like)
_error.register_autograd(
    lambda ctx, g: g * (2 / math.sqrt(math.pi)) * (-ctx.saved_tensors[0].square()).exp(),
    setup_context=save,
)
right(_error, one)


def copied_in_c(x: Tensor, times: int) -> Tensor:
    if times < 0 or not x.dim():
        raise ValueError("copied_in_c takes rows, and how often they are wanted")
    x = x.contiguous()
    result = torch.empty(times * x.shape[0], *x.shape[1:], dtype=x.dtype)
    for n in range(times if x.nbytes else 0):
        ctypes.memmove(result.data_ptr() + n * x.nbytes, x.data_ptr(), x.nbytes)
    return result


right(
    define(
        "copied_in_c",
        copied_in_c,
        fake=lambda x, times: x.new_empty(times * x.shape[0], *x.shape[1:]),
    ),
    lambda: [(torch.arange(6.0).view(2, 3), 2)],
)
