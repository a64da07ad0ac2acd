"""A quantized linear layer whose operators take and return dataclasses.

Training engines register the forward and the backward of a layer as two operators. Half of the
fields of their arguments and results are None, depending on options. Run this file to train the
layer, in eager mode and compiled.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import torchop


@dataclass
class Quantized:
    """A tensor of int8 values, and the factor that restores their range."""

    data: Tensor
    scale: Tensor
    dtype: torch.dtype


@dataclass
class LinearInputs:
    x: Tensor
    weight: Tensor
    bias: Tensor | None = None


@dataclass
class LinearOutputs:
    y: Tensor
    saved: Quantized | None
    has_bias: bool


@dataclass
class LinearGradients:
    x: Tensor
    weight: Tensor
    bias: Tensor | None


def quantized(x: Tensor) -> Quantized:
    scale = x.abs().amax().clamp(min=1e-12) / 127
    return Quantized((x / scale).round().to(torch.int8), scale, x.dtype)


@torchop.custom_op("structures::linear", mutates_args=())
def linear(inputs: LinearInputs, saves: bool) -> LinearOutputs:
    x = quantized(inputs.x)
    y = (x.data.to(x.dtype) * x.scale) @ inputs.weight.T
    y = y if inputs.bias is None else y + inputs.bias
    return LinearOutputs(y, x if saves else None, inputs.bias is not None)


@linear.register_fake
def _(inputs, saves):
    x = inputs.x
    saved = Quantized(torch.empty_like(x, dtype=torch.int8), x.new_empty(()), x.dtype)
    y = x.new_empty(*x.shape[:-1], inputs.weight.shape[0])
    return LinearOutputs(y, saved if saves else None, inputs.bias is not None)


@torchop.custom_op("structures::linear_backward", mutates_args=())
def linear_backward(grad: Tensor, x: Quantized, weight: Tensor, has_bias: bool) -> LinearGradients:
    values = x.data.to(x.dtype) * x.scale
    return LinearGradients(grad @ weight, grad.T @ values, grad.sum(0) if has_bias else None)


@linear_backward.register_fake
def _(grad, x, weight, has_bias):
    of_x = torch.empty_like(x.data, dtype=x.dtype)
    return LinearGradients(
        of_x, torch.empty_like(weight), weight.new_empty(weight.shape[0]) if has_bias else None
    )


def setup_context(ctx, inputs, output):
    saved = output.saved
    ctx.save_for_backward(saved.data, saved.scale, inputs[0].weight)
    ctx.dtype, ctx.has_bias = saved.dtype, output.has_bias


@linear.register_autograd(setup_context=setup_context)
def _(ctx, grad):
    data, scale, weight = ctx.saved_tensors
    gradients = linear_backward(grad.y, Quantized(data, scale, ctx.dtype), weight, ctx.has_bias)
    return vars(gradients), None


def losses(layer, steps: int = 5) -> list[float]:
    """Train a layer with a bias, and return the loss of each step."""
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((16, 8), (4, 8), (4,))
    )
    parameters = [weight.requires_grad_(), bias.requires_grad_()]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for _ in range(steps):
        loss = layer(x, *parameters).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return linear(LinearInputs(x, weight, bias), True).y


if __name__ == "__main__":
    eager = losses(layer)
    compiled = losses(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager))
    print(f"the loss falls from {eager[0]:.3f} to {eager[-1]:.3f}, in eager mode and compiled")
    print(linear.schema)
