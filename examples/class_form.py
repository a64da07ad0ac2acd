"""An operator in one class: kernel, fake kernel, formula, inverse, cost, and sample inputs."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import torchop


class KeepsShape:
    """A base class for operators whose result has the shape of the first argument."""

    @staticmethod
    def fake(x: Tensor, *rest: object) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def examples() -> Iterator[tuple[object, ...]]:
        yield torch.randn(4, 3, requires_grad=True), 2
        yield torch.randn(3, 0), -1


@torchop.operator("examples::rotate")
class rotate(KeepsShape):
    """Rotate the columns of a matrix to the right by `steps`, with NumPy."""

    inplace = True  # also defines rotate.inplace, the operator examples::rotate_
    checkpoint_policy = "recompute"  # cheap, so activation checkpointing need not save the result

    @staticmethod
    def forward(x: Tensor, steps: int) -> Tensor:
        return torch.from_numpy(np.roll(x.detach().numpy(), steps, axis=1))

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, int], output: Tensor) -> None:
        ctx.steps = inputs[1]

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return rotate(grad, -ctx.steps), None

    @staticmethod
    def inverse(output: Tensor, steps: int) -> Tensor:
        return rotate(output, -steps)

    @staticmethod
    def flop_formula(x: torch.Size, steps: int) -> int:
        return x.numel()


def main() -> None:
    print(rotate)
    torchop.opcheck(rotate)  # checks the operator with the arguments from `examples`
    print("opcheck: all examples pass")

    x = torch.arange(6.0).reshape(2, 3)
    rotated = rotate(x, 1)
    print("rotated:", rotated.tolist())
    assert torch.equal(torchop.inverse(rotate)(rotated, 1), x)
    assert rotate.inplace is not None
    assert rotate.inplace(rotated, -1) is rotated
    assert torch.equal(rotated, x)
    print("the inverse and the in-place form bring it back")

    def undone(x: Tensor) -> Tensor:
        return torchop.inverse(rotate)(rotate(x, 2).sin(), 2)

    compiled = torch.compile(undone, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), x.sin())
    print("torch.compile: the inverse is in the graph")

    with FlopCounterMode(display=False) as counter:
        undone(x)
    print("FlopCounterMode:", counter.get_total_flops())


if __name__ == "__main__":
    main()
