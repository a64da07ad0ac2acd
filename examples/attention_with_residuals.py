"""Attention in NumPy, with the log-sum-exp as a residual for the backward."""

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import torchop
from torchop.testing import saved_bytes


@torchop.custom_op(
    "examples::attention", mutates_args=(), device_types="cpu", residuals={"lse": Tensor}
)
def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q.numpy() @ k.numpy().swapaxes(-1, -2) * q.shape[-1] ** -0.5
    lse = np.logaddexp.reduce(scores, -1)
    output = torch.from_numpy(np.exp(scores - lse[..., None]) @ v.numpy())
    if not torchop.records_gradient():
        return output
    return torchop.residuals(output, torch.from_numpy(lse))


@attention.register_fake
def _(q, k, v):
    return torchop.residuals(torch.empty_like(q), q.new_empty(q.shape[:-1]))


def attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, output: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients. torchop saves the tensors that the parameters name."""
    arrays = (tensor.numpy() for tensor in (grad, q, k, v, output, lse))
    grad_, q_, k_, v_, output_, lse_ = arrays
    scale = q_.shape[-1] ** -0.5
    weights = np.exp(q_ @ k_.swapaxes(-1, -2) * scale - lse_[..., None])
    inner = (grad_ * output_).sum(-1, keepdims=True)
    scores = weights * (grad_ @ v_.swapaxes(-1, -2) - inner) * scale
    gradients = scores @ k_, scores.swapaxes(-1, -2) @ q_, weights.swapaxes(-1, -2) @ grad_
    return tuple(torch.from_numpy(np.ascontiguousarray(gradient)) for gradient in gradients)


attention.register_autograd(backward_kernel=attention_backward)
# Batches and heads are independent, so each rank can compute its share of them without
# communication.
attention.register_sharding("b h q d, b h k d, b h k d -> b h q d; b h q", whole="q k d")


class Attention(torch.nn.Module):
    """Self-attention with two heads."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project = torch.nn.Linear(size, 3 * size)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = (part.contiguous() for part in heads)
        return attention(q, k, v).transpose(1, 2).flatten(-2)


def train(model: torch.nn.Module, x: Tensor, steps: int) -> float:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def main() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 5, 4, requires_grad=True) for _ in range(3))
    reference = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(attention(q, k, v), reference)
    expected = torch.autograd.grad(reference.sum(), (q, k, v))
    checkpointed = checkpoint(attention, q, k, v, use_reentrant=False)
    for output in (attention(q, k, v), checkpointed):
        torch.testing.assert_close(torch.autograd.grad(output.sum(), (q, k, v)), expected)
    print("saved for backward:", saved_bytes(attention, q, k, v), "bytes")

    model, x = Attention(8), torch.randn(2, 5, 8)
    before = train(model, x, 1)
    after = train(torch.compile(model, fullgraph=True, backend="aot_eager"), x, 100)
    print("trained, compiled:", after < before / 2)

    program = torch.export.export(model.eval(), (x,))
    names = [str(node.target) for node in program.graph.nodes if "attention" in str(node.target)]
    print("exported:", *names)


if __name__ == "__main__":
    main()
