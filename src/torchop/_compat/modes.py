"""Modes, which see what functions and operators a thread calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

# Within it, neither a subclass of Tensor nor a mode sees what functions are called.
plain_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def device(name: str | torch.device) -> torch.device:
    """The device of this name, made where a mode of the user's does not see it."""
    with torch._C.DisableTorchFunction():
        return torch.device(name)


def dispatch_modes_are_active() -> bool:
    """Whether a mode sees the operators that this thread calls."""
    return torch._C._len_torch_dispatch_stack() > 0
