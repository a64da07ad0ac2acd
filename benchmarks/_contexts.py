"""What sends a call to the dispatcher: a profiler, a mode, a tensor of a subclass.

Each does as little as it can, so that the way there and back is what is measured.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def profiler() -> contextlib.AbstractContextManager[Any]:
    """A profiler that observes every operator and stores nothing.

    The default one would keep an event for every call of the benchmark.
    """
    return torch.autograd.profiler.emit_itt()


class PassOn(TorchDispatchMode):
    """Gets every operator, and calls it."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapper(Tensor):
    """Holds a tensor, and calls every operator with that as its first argument."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> Wrapper:
        wrapper: Wrapper = Tensor._make_wrapper_subclass(cls, held.shape)
        wrapper.held = held
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared as a function, with other defaults
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(args[0].held, *args[1:], **(kwargs or {}))
