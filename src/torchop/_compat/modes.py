"""Modes, which see what functions and operators a thread calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import torch

from torchop._compat.classes import TorchDispatchMode

# Within it, neither a subclass of Tensor nor a mode sees what functions are called.
plain_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def device(name: str | torch.device) -> torch.device:
    """The device of this name, made where a mode of the user's does not see it."""
    with torch._C.DisableTorchFunction():
        return torch.device(name)


def dispatch_modes_are_active() -> bool:
    """Whether a mode sees the operators that this thread calls."""
    return torch._C._len_torch_dispatch_stack() > 0


def observing_mode(
    note: Callable[[str, tuple[Any, ...], dict[str, Any]], None],
) -> contextlib.AbstractContextManager[Any]:
    """A mode that tells of each call of an operator in this thread, before it happens."""

    class Observing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            note(func._name.removesuffix(".default"), args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return cast("contextlib.AbstractContextManager[Any]", cast(Any, Observing)())
