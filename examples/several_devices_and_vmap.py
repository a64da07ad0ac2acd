"""Define an operator with a kernel for each device and a vmap rule."""

import numpy as np
import torch
from torch import Tensor

import torchop


# This kernel is for the CPU, and the next kernel is for the GPU. A call runs the kernel for the
# device of its tensors.
@torchop.custom_op("examples::cumulative_max", mutates_args=(), device_types="cpu")
def cumulative_max(x: Tensor, dim: int) -> Tensor:
    # NumPy's result would have the strides of the input. Make the input contiguous, because the
    # result of every kernel must have the same strides.
    return torch.from_numpy(np.maximum.accumulate(x.contiguous().numpy(), axis=dim))


@cumulative_max.register_kernel("cuda")
def _(x: Tensor, dim: int) -> Tensor:
    return x.cummax(dim).values


@cumulative_max.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cumulative_max.register_vmap
def _(info, in_dims, x: Tensor, dim: int) -> tuple[Tensor, int]:
    # Make the batch dimension the first one. This shifts the other dimensions by one, so add one to
    # `dim` unless it is negative.
    x = x.movedim(in_dims[0], 0)
    return cumulative_max(x, dim + 1 if dim >= 0 else dim), 0


def main() -> None:
    print(cumulative_max)
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        x = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 6.0]], device=device)
        running = cumulative_max(x, 1)
        torch.testing.assert_close(running, x.cummax(1).values)
        print(f"{device}:", running.tolist())

        batch = torch.randn(2, 7, 3, device=device)
        mapped = torch.vmap(cumulative_max, in_dims=(1, None))(batch, 0)
        looped = torch.stack([cumulative_max(batch[:, i], 0) for i in range(7)])
        torch.testing.assert_close(mapped, looped)
        print(f"{device}: vmap over a batch of 7 in one call, as in a loop")
        torchop.opcheck(cumulative_max, (x, -1))
        torchop.opcheck(cumulative_max, (x.t(), 0))


if __name__ == "__main__":
    main()
