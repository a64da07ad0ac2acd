"""A quantized linear layer in the shape of Transformer Engine's.

The forward and the backward are two operators that take and return dataclasses. Quantizers and half
of the tensors are optional. Transformer Engine computes in float8; this example computes in scaled
int8, so it runs on CPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import torchop


@torchop.opaque(value=True)
@dataclass(frozen=True)
class Quantizer:
    """Rounds tensors to integers of a number of bits. Compiled graphs contain it as a constant."""

    bits: int = 8

    def quantize(self, x: Tensor) -> Quantized:
        limit = 2 ** (self.bits - 1) - 1
        scale = x.abs().amax().clamp(min=1e-12) / limit
        return Quantized((x / scale).round().to(torch.int8), scale, x.dtype)


@dataclass
class Quantized:
    """A tensor of integers, and the scale that restores its range."""

    data: Tensor
    scale: Tensor
    dtype: torch.dtype

    def dequantize(self) -> Tensor:
        return self.data.to(self.dtype) * self.scale


@dataclass
class Inputs:
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    x_quantizer: Quantizer | None = None
    weight_quantizer: Quantizer | None = None
    grad_quantizer: Quantizer | None = None
    saves: bool = True


@dataclass
class Saved:
    """The quantized operands, which the backward uses instead of the inputs."""

    x: Quantized | None
    weight: Quantized | None


@dataclass
class Outputs:
    y: Tensor
    saved: Saved | None


@dataclass
class Gradients:
    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def quantized(x: Tensor, quantizer: Quantizer | None) -> Quantized | None:
    return None if quantizer is None else quantizer.quantize(x)


def operand(x: Tensor, of: Quantized | None) -> Tensor:
    return x if of is None else of.dequantize()


def linear_function(inputs: Inputs) -> Outputs:
    x = quantized(inputs.x, inputs.x_quantizer)
    weight = quantized(inputs.weight, inputs.weight_quantizer)
    y = operand(inputs.x, x) @ operand(inputs.weight, weight).T
    y = y if inputs.bias is None else y + inputs.bias.to(y.dtype)
    return Outputs(y, Saved(x, weight) if inputs.saves else None)


def linear_backward_function(
    grad: Tensor, inputs: Inputs, saved: Saved | None, needs_x: bool, needs_weight: bool
) -> Gradients:
    saved = Saved(None, None) if saved is None else saved
    grad = operand(grad, quantized(grad, inputs.grad_quantizer))
    return Gradients(
        grad @ operand(inputs.weight, saved.weight) if needs_x else None,
        grad.T @ operand(inputs.x, saved.x) if needs_weight else None,
        None if inputs.bias is None else grad.sum(0).to(inputs.bias.dtype),
    )


linear = torchop.custom_op("structures::linear", linear_function, mutates_args=())
linear_backward = torchop.custom_op(
    "structures::linear_backward", linear_backward_function, mutates_args=()
)


def fake_quantized(x: Tensor, quantizer: Quantizer | None) -> Quantized | None:
    if quantizer is None:
        return None
    return Quantized(torch.empty_like(x, dtype=torch.int8), x.new_empty(()), x.dtype)


@linear.register_fake
def _(inputs):
    x = fake_quantized(inputs.x, inputs.x_quantizer)
    weight = fake_quantized(inputs.weight, inputs.weight_quantizer)
    y = inputs.x.new_empty(*inputs.x.shape[:-1], inputs.weight.shape[0])
    return Outputs(y, Saved(x, weight) if inputs.saves else None)


@linear_backward.register_fake
def _(grad, inputs, saved, needs_x, needs_weight):
    return Gradients(
        torch.empty_like(inputs.x) if needs_x else None,
        torch.empty_like(inputs.weight) if needs_weight else None,
        None if inputs.bias is None else torch.empty_like(inputs.bias),
    )


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output.saved)


@linear.register_autograd(setup_context=setup_context)
def _(ctx, grad):
    (needs,) = ctx.needs_input_grad
    return linear_backward(grad.y, *ctx.saved_tensors, needs["x"], needs["weight"])
