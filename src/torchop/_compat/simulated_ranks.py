"""Ranks that are simulated in one process: tensors that hold a shard for each, and collectives.

Of the collectives that DTensor calls, a mode records the names, and how much they move.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchop._compat.classes import TorchDispatchMode, tree_leaves


@contextlib.contextmanager
def simulated_mesh(shape: Sequence[int], device: str = "cpu") -> Iterator[Any]:
    """Yields a device mesh whose ranks are all here; raises if there is a real group."""
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
    # The group replaces the hook for uncaught exceptions and never puts it back.
    excepthook = sys.excepthook
    # Before the mode: it would find factory functions of the import.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        with LocalTensorMode(count):
            yield init_device_mesh(device, tuple(shape))
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def placed(tensor: torch.Tensor, mesh: Any, placements: Sequence[Any]) -> Any:
    """A DTensor with these placements, on ranks that are simulated or real, from the whole of it.

    Of a pending sum, every rank has a share of its own size.
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    pending = [dim for dim, placement in enumerate(placements) if placement.is_partial()]
    without_sums = [Replicate() if p.is_partial() else p for p in placements]
    value = distribute_tensor(tensor.detach().clone(), mesh, without_sums, src_data_rank=None)
    # A rank of its own copy, which it may write into.
    local = _on_each_rank(
        value.to_local(),
        lambda rank, part: part * _share(mesh, rank, pending, placements) if pending else part,
    )
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=tensor.shape, stride=value.stride()
    )


def _share(mesh: Any, rank: int, pending: Sequence[int], placements: Sequence[Any]) -> float:
    """The share of a rank: 1/3 and 2/3 of two, and so on; of an average, so often as much."""
    where = (mesh.mesh == rank).nonzero()[0].tolist()
    share = 1.0
    for dim in pending:
        count = mesh.size(dim)
        share *= 2 * (where[dim] + 1) / (count * (count + 1))
        share *= count if placements[dim].reduce_op == "avg" else 1
    return share


def _on_each_rank(tensor: torch.Tensor, function: Any) -> torch.Tensor:
    """A tensor with what a function of the rank and its part returns for each rank."""
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
    """Whether this process is a rank of a program, or simulates some."""
    module = sys.modules.get("torch.distributed")
    return module is not None and module.is_available() and module.is_initialized()


def are_simulated() -> bool:
    """Whether what runs in this thread stands for what all ranks do."""
    module = sys.modules.get("torch.distributed._local_tensor")
    return module is not None and module.enabled_local_tensor_mode() is not None


def on_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a function that reads data once for each simulated rank, with the tensors of that."""
    from torch.distributed._local_tensor import maybe_run_for_local_tensor

    return maybe_run_for_local_tensor(function)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """What all simulated ranks agree about; raises AssertionError if they do not."""
    from torch.distributed._local_tensor import LocalTensor

    if not isinstance(tensor, LocalTensor):
        return tensor
    first, *others = [part.detach() for part in tensor._local_tensors.values()]
    # Its own `reconcile` takes NaN for different from NaN.
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=0, equal_nan=True)
    return first.clone()


_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "shard_dim_alltoall": "all_to_all",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "scatter_": "scatter",
    "gather_": "gather",
    "send": "send",
    "recv_": "recv",
}
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "_dtensor")


class RecordingCollectives(TorchDispatchMode):
    """Records the collectives of a block: the name of each, and the bytes on one rank."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        from torch.distributed.tensor import DTensor

        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls the collectives
        name = func._schema.name.rpartition("::")[2]
        result = func(*args, **(kwargs or {}))
        if func.namespace in _NAMESPACES and name in _NAMES:
            passed, returned = _bytes((args, kwargs)), _bytes(result)
            self.calls.append((_NAMES[name], max(passed, returned)))
        return result


def _bytes(values: Any) -> int:
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return sum(max(_sizes(tensor), default=0) for tensor in tensors)


def _sizes(tensor: torch.Tensor) -> Iterator[int]:
    """The bytes of a tensor on each rank that is here."""
    parts = getattr(tensor, "_local_tensors", {0: tensor})
    for part in parts.values():
        yield part.numel() * part.element_size()
