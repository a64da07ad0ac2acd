"""Change a setting of PyTorch temporarily."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def changed(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Change a setting inside a `with` block.

    Args:
        change: `change(value)` sets the setting to `value`.
        value: the value of the setting inside the block.
        before: the value to restore after the block.
    """
    change(value)
    try:
        yield
    finally:
        change(before)
