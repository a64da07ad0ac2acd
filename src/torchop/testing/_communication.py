"""communication: the collectives that a call makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchop._compat import classes, dtensor, simulated_ranks
from torchop._compat.simulated_ranks import RecordingCollectives


class Collective(NamedTuple):
    """One collective: its kind, and how much it moves.

    Attributes:
        name: `"all_gather"`, `"all_reduce"`, `"reduce_scatter"`, `"all_to_all"`, `"broadcast"`,
            `"scatter"`, `"gather"`, `"send"` or `"recv"`.
        bytes: how many bytes a rank sends or receives, whichever is more.

    Example:
        >>> from torchop.testing import Collective
        >>> Collective("all_gather", 64) in [Collective("all_gather", 64)]
        True
    """

    name: str
    bytes: int


def communication(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Sequence[int] = (2,),
    placements: Sequence[Any] | None = None,
    **kwargs: Any,
) -> list[Collective]:
    """Returns the collectives that a call makes, on ranks that are simulated in this process.

    Args:
        fn: the function to call, with DTensors instead of the tensors among its arguments. If it
            calls `backward`, the list includes the collectives of the backward.
        args: its positional arguments.
        mesh: the shape of the device mesh, whose ranks are simulated.
        placements: for each tensor among the arguments, a `torch.distributed.tensor` placement for
            all dimensions of the mesh, or a sequence with one for each dimension; by default, they
            are replicated. If the tensors are already DTensors, the call uses these and their
            ranks.
        kwargs: its keyword arguments.

    Returns:
        A list of `Collective(name, bytes)`, in the order of the calls; empty if there are none.

    Raises:
        ValueError: there are not as many placements as tensors.
        RuntimeError: the process belongs to a process group, and the tensors are not DTensors.

    Example:
        >>> import torch
        >>> from torch.distributed.tensor import Replicate, Shard
        >>> from torchop.testing import communication
        >>> a, b = torch.ones(4, 8), torch.ones(8, 4)
        >>> communication(torch.mm, a, b, placements=[Shard(0), Replicate()])
        []
        >>> communication(lambda a, b: (a @ b).full_tensor(), a, b, placements=[Shard(0), Shard(1)])
        [Collective(name='all_gather', bytes=128), Collective(name='all_gather', bytes=64)]

    The idea is `torch.distributed.tensor.debug.CommDebugMode`, which counts them.
    """
    if dtensor.has_dtensors((args, kwargs)):
        return _recorded(fn, args, kwargs)
    tensors = [t for t in classes.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if placements is not None and len(placements) != len(tensors):
        raise ValueError(
            f"communication(fn, ...): there are {len(tensors)} tensors among the arguments, and "
            f"{len(placements)} placements. Pass one for each."
        )
    device = tensors[0].device.type if tensors else "cpu"
    with simulated_ranks.simulated_mesh(mesh, device) as device_mesh:
        from torch.distributed.tensor import Replicate  # for start-up time

        rest = iter(placements or [Replicate()] * len(tensors))

        def placed(tensor: Tensor) -> Any:
            each = next(rest)
            every = list(each) if isinstance(each, (list, tuple)) else [each] * device_mesh.ndim
            value = simulated_ranks.placed(tensor, device_mesh, every)
            return value.requires_grad_(tensor.requires_grad)

        args, kwargs = classes.tree_map_only(Tensor, placed, (args, kwargs))
        return _recorded(fn, args, kwargs)


def _recorded(fn: Callable[..., Any], args: Any, kwargs: Any) -> list[Collective]:
    with RecordingCollectives() as recording:
        fn(*args, **kwargs)
    return [Collective(*call) for call in recording.calls]
