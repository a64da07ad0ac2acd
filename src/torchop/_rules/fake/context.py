"""`get_ctx`: return the context that a fake kernel uses to create data-dependent sizes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from torchop._compat import fake_tensors
from torchop._compat.classes import FakeImplCtx
from torchop._core.definition import Definition


class NoContext:
    """The context of a fake kernel that runs on meta tensors, which support no dynamic sizes."""

    def __init__(self, definition: Definition) -> None:
        self._definition = definition

    def create_unbacked_symint(self, *, min: int = 2, max: int | None = None) -> Any:
        """Deprecated alias of `new_dynamic_size`. In this class, both methods raise an error."""
        return self.new_dynamic_size()

    def new_dynamic_size(self, *, min: int = 0, max: int | None = None) -> Any:
        raise RuntimeError(
            f"{self._definition}: you're trying to run this operator with meta Tensors (as opposed "
            "to FakeTensors), but the output has a data-dependent shape. Use FakeTensorMode."
        )


class _Stack(threading.local):
    def __init__(self) -> None:
        self.contexts: list[Any] = []


_running = _Stack()


@contextlib.contextmanager
def running(context: Any) -> Iterator[None]:
    _running.contexts.append(context)
    try:
        yield
    finally:
        _running.contexts.pop()


def innermost() -> Any:
    return _running.contexts[-1] if _running.contexts else None


def get_ctx() -> FakeImplCtx:
    """Return the context of the fake kernel that is running in this thread.

    Call its method `new_dynamic_size(*, min=0, max=None)` to create a size that depends on data.

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

    Based on `torch.library.get_ctx`, but with one context per thread instead of one per process.
    """
    context: FakeImplCtx | None = innermost()
    if context is not None:
        return context
    stock = fake_tensors.stock_fake_context()
    if stock is None:
        raise RuntimeError(
            "get_ctx() was called outside a fake kernel. Call it in a function that is registered "
            "with register_fake."
        )
    return stock
