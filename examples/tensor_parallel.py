"""Train a transformer block whose matrices are sharded over several processes.

torchrun --standalone --nproc-per-node 4 examples/tensor_parallel.py
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import torchop


@torchop.custom_op("examples::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight


rms_norm.register_fake(like="x")
rms_norm.derive_autograd()
rms_norm.register_sharding("... d, d -> ... d", whole="d")


@torchop.custom_op("examples::matmul", mutates_args=())
def matmul(a: Tensor, b: Tensor) -> Tensor:
    return a @ b


matmul.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
matmul.derive_autograd()
matmul.register_sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))


def block(x: Tensor, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = torch.nn.functional.gelu(matmul(rms_norm(x, weight), up))
    return x + matmul(hidden, down)


def parameters() -> list[Tensor]:
    torch.manual_seed(0)  # the same numbers on all ranks
    return [torch.ones(8), torch.randn(8, 16) / 4, torch.randn(16, 8) / 4]


def train(x: Tensor, weights: list[Tensor], steps: int) -> list[float]:
    """Train for some steps, and return the losses. `x` and `weights` may be DTensors."""
    optimizer = torch.optim.SGD([weight.requires_grad_() for weight in weights], lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = block(x, *weights).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss) for loss in losses]


def train_on(mesh: DeviceMesh) -> tuple[list[float], list[float], dict[str, int]]:
    """Train on one process and on all.

    Returns:
        The losses on one process, the losses on all processes, and the number of collectives in a
        call to `block`.
    """
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    # Shard the columns of the first matrix and the rows of the second one. The block then needs
    # just one all-reduce, at the end.
    placements = [[Replicate()], [Shard(1)], [Shard(0)]]
    weights = [
        distribute_tensor(weight, mesh, placement)
        for weight, placement in zip(parameters(), placements, strict=True)
    ]
    x = distribute_tensor(rows, mesh, [Replicate()])
    with CommDebugMode() as calls:
        block(x, *weights).full_tensor()
    collectives = {str(op): count for op, count in calls.get_comm_counts().items()}
    return train(rows, parameters(), 3), train(x, weights, 3), collectives


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    alone, together, collectives = train_on(mesh)
    torch.testing.assert_close(together, alone)
    if dist.get_rank() == 0:
        print(f"losses {', '.join(f'{loss:.3f}' for loss in together)}; {collectives}")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a normal exit may crash, because threads of gloo are still running


if __name__ == "__main__":
    main()
