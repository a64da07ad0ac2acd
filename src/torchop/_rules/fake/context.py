"""get_ctx: the context with which a fake kernel makes sizes that depend on data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torchop._compat import fake_tensors
from torchop._compat.classes import FakeImplCtx
from torchop._core.definition import Definition


class NoContext:
    """The context on meta tensors, where no size can depend on data."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition

    def create_unbacked_symint(self, *, min: int = 2, max: int | None = None) -> Any:
        """The older name of `new_dynamic_size`."""
        return self.new_dynamic_size()

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
        raise RuntimeError(
            f"{self._definition}: you're trying to run this operator with meta Tensors (as opposed "
            "to FakeTensors), but its output has a data-dependent shape. Use FakeTensorMode."
        )


class _Stack(threading.local):
    """The contexts of the fake kernels that run in this thread, the innermost last."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []


_running = _Stack()


@contextlib.contextmanager
def running(context: Any) -> Iterator[None]:
    """Makes `get_ctx` return this context in this thread."""
    _running.contexts.append(context)
    try:
        yield
    finally:
        _running.contexts.pop()


def innermost() -> Any:
    """The context of the fake kernel of ours that runs in this thread, or None."""
    return _running.contexts[-1] if _running.contexts else None


def get_ctx() -> FakeImplCtx:
    """Returns the context of the fake kernel that is running in this thread.

    Its method `new_dynamic_size(*, min=0, max=None)` makes a size that depends on data, in
    elements.

    Raises:
        RuntimeError: no fake kernel is running.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::nonzero", mutates_args=())
        ... def nonzero(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.nonzero(x)
        >>> @nonzero.register_fake
        ... def _(x):
        ...     count = torchop.get_ctx().new_dynamic_size()
        ...     return x.new_empty([count, x.dim()], dtype=torch.int64)

    The idea is `torch.library.get_ctx`, whose context is one per process; this one is per thread.
    """
    context: FakeImplCtx | None = innermost()
    if context is not None:
        return context
    stock = fake_tensors.stock_fake_context()
    if stock is None:
        raise RuntimeError(
            "get_ctx() was called outside a fake kernel; it is for functions that register_fake "
            "registered, while they run."
        )
    return stock
