"""A profiler, a mode and a subclass that send calls to the dispatcher, and do nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


def profiler() -> contextlib.AbstractContextManager[Any]:
    """Return a profiler that observes every operator but stores no events."""
    return torch.autograd.profiler.emit_itt()


class PassOn(TorchDispatchMode):
    """Call every operator unchanged."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return func(*args, **(kwargs or {}))


class Wrapper(Tensor):
    """Wrap a tensor, and unwrap it when it is the first argument of an operator."""

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
