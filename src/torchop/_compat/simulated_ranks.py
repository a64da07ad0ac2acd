"""Simulate the ranks of a process group in one process, with PyTorch's LocalTensor.

A LocalTensor contains the local tensors of all ranks.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch


@contextlib.contextmanager
def simulated_mesh(shape: Sequence[int], device: str = "cpu") -> Iterator[Any]:
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    count = torch.Size(shape).numel()
    if dist.is_initialized():
        raise RuntimeError(
            "ranks are simulated in a process that belongs to no process group, but this one has "
            f"rank {dist.get_rank()} of {dist.get_world_size()}."
        )
    # Restore `sys.excepthook` afterwards: `init_process_group`
    # (torch/distributed/distributed_c10d.py) replaces it, and `destroy_process_group` does not
    # restore it.
    excepthook = sys.excepthook
    # Call this outside of LocalTensorMode, because it imports modules, and the mode would affect
    # the tensors that these modules create.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with LocalTensorMode(count):
            yield init_device_mesh(device, tuple(shape))
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def placed(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """Distribute `tensor` with the given placements, over simulated or real ranks.

    For a Partial placement, each rank gets a different share of the tensor's value.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    pending = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
    without_sums = [Replicate() if p.is_partial() else p for p in placements]
    value = distribute_tensor(tensor.detach().clone(), mesh, without_sums, src_data_rank=None)
    # The operator under test may write to the local tensor, so `_on_each_rank` passes each rank a
    # separate copy.
    local = _on_each_rank(
        value.to_local(),
        lambda rank, part: part * _share(mesh, rank, pending, placements) if pending else part,
    )
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=value.stride()
    )


def _share(mesh: Any, rank: int, pending: Sequence[int], placements: Sequence[Any]) -> float:
    """Return the factor by which to multiply a value to get a rank's share of it.

    The factors of all ranks add up to 1. They differ so that tests notice mixed-up ranks: on two
    ranks, for example, they are 1/3 and 2/3. For an average, each factor is multiplied by the
    number of ranks, so that the shares average to the value.
    """
    where = (mesh.mesh == rank).nonzero()[0].tolist()
    share = 1.0
    for dim in pending:
        count = mesh.size(dim)
        share *= 2 * (where[dim] + 1) / (count * (count + 1))
        share *= count if placements[dim].reduce_op == "avg" else 1
    return share


def _on_each_rank(tensor: torch.Tensor, function: Any) -> torch.Tensor:
    """Call `function(rank, local_tensor)` on each rank, and return a LocalTensor of the results."""
    import torch.distributed as dist
    from torch.distributed._local_tensor import LocalTensor, local_tensor_mode

    mode = local_tensor_mode()
    if mode is None:
        result: torch.Tensor = function(dist.get_rank(), tensor)
        return result
    with mode.disable():
        parts = {
            rank: tensor._local_tensors[rank] if isinstance(tensor, LocalTensor) else tensor
            for rank in mode.ranks
        }
        return LocalTensor({rank: function(rank, part.clone()) for rank, part in parts.items()})


def has_process_group() -> bool:
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


def are_simulated() -> bool:
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.enabled_local_tensor_mode() is not None


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's value, or raise AssertionError if the values on simulated ranks differ."""
    from torch.distributed._local_tensor import LocalTensor

    if not isinstance(tensor, LocalTensor):
        return tensor
    first, *others = [part.detach() for part in tensor._local_tensors.values()]
    # Avoid `LocalTensor.reconcile`, which considers NaNs different from each other.
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
    return first.clone()
