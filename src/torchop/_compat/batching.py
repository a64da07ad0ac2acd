"""The innermost `torch.vmap`, inside of its batching kernel."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch

from torchop._compat import dispatch, functorch


class Vmap(NamedTuple):
    """The innermost `vmap` that is active."""

    level: int
    batch_size: int
    randomness: str

    def unwrap(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int | None]:
        """The tensor with the dimension that is mapped over, and which that is."""
        tensor, dim = torch._C._functorch._unwrap_batched(tensor, self.level)
        return tensor, dim

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose first dimension is mapped over, as `vmap` shows it."""
        from torch._functorch import vmap

        wrapped: torch.Tensor = cast(Any, vmap)._add_batch_dim(tensor, 0, self.level)
        return wrapped


def current_vmap() -> Vmap:
    """The `vmap` in whose batching kernel we are."""
    from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

    interpreter: Any = retrieve_current_functorch_interpreter()
    return Vmap(interpreter.level(), int(interpreter.batch_size()), interpreter.randomness())


@contextlib.contextmanager
def below_vmap() -> Iterator[None]:
    """Makes calls go on from the batching kernel of the innermost `vmap`."""
    with (
        dispatch.without_key("FuncTorchBatched"),
        dispatch.without_key(functorch.VMAP_OF_RANDOM_CALLS),
    ):
        yield
