"""Train through a NumPy function with an autograd formula."""

import numpy as np
import torch
from torch import Tensor

import torchop


@torchop.custom_op("examples::softplus", mutates_args=(), device_types="cpu")
def softplus(x: Tensor, beta: float = 1.0) -> Tensor:
    return torch.from_numpy(np.logaddexp(0, beta * x.detach().numpy()) / beta)


@softplus.register_fake
def _(x: Tensor, beta: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def save_inputs(ctx, inputs, output):
    x, ctx.beta = inputs  # contains the default of `beta` if the caller has omitted it
    ctx.save_for_backward(x)


@softplus.register_autograd(setup_context=save_inputs)
def _(ctx, grad):
    # The formula consists of PyTorch operators, so it can be differentiated again.
    (x,) = ctx.saved_tensors
    return grad * torch.sigmoid(ctx.beta * x), None


def train(x: Tensor, steps: int) -> float:
    target = softplus(3 * x)
    scale = torch.nn.Parameter(torch.tensor(0.5))
    optimizer = torch.optim.SGD([scale], lr=0.3)
    for _ in range(steps):
        loss = (softplus(scale * x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return scale.item()


def main() -> None:
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(softplus, (x, 2.0))
    assert torch.autograd.gradgradcheck(softplus, (x, 2.0))
    slope = torch.func.grad(lambda x: softplus(x).sum())(x.detach())
    assert torch.allclose(slope, torch.sigmoid(x.detach()))
    torchop.opcheck(softplus, (x,), {"beta": 2.0})
    print("gradcheck, gradgradcheck, torch.func.grad and opcheck agree with the formula")

    scale = train(torch.linspace(-2, 2, 50), steps=100)
    assert abs(scale - 3) < 1e-3
    print(f"training found the scale {scale:.4f}; the data was made with 3")


if __name__ == "__main__":
    main()
