"""Apply a temporary setting of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def changed(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Apply a setting, and restore it at the end of the block.

    Args:
        change: the function that sets it.
        value: the value in the block.
        before: the value to restore.
    """
    change(value)
    try:
        yield
    finally:
        change(before)
