"""Apply a temporary setting of PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def changed(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Change a setting for a block.

    Args:
        change: a function that changes the setting to its argument.
        value: the value of the setting in the block.
        before: the value after the block.
    """
    change(value)
    try:
        yield
    finally:
        change(before)
