"""One operator with a kernel for each device, mapped over a batch without a loop."""

import numpy as np
import torch
from torch import Tensor

import torchop


# This kernel is for the CPU, the next for the GPU. The device of the tensors selects one.
@torchop.custom_op("examples::cumulative_max", mutates_args=(), device_types="cpu")
def cumulative_max(x: Tensor, dim: int) -> Tensor:
    # NumPy preserves the strides of the input. Copy to contiguous memory, because all kernels must
    # return the same strides.
    return torch.from_numpy(np.maximum.accumulate(x.contiguous().numpy(), axis=dim))


@cumulative_max.register_kernel("cuda")
def _(x: Tensor, dim: int) -> Tensor:
    return x.cummax(dim).values


@cumulative_max.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@cumulative_max.register_vmap
def _(info, in_dims, x: Tensor, dim: int) -> tuple[Tensor, int]:
    # The batch dimension is now the first, so a non-negative `dim` shifts by one.
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
