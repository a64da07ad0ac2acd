"""The collectives that DTensor calls: their names, and how much they move."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchop._compat.classes import TorchDispatchMode, tree_leaves

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
