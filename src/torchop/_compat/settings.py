from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def changed(change: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    """Call `change(value)` before a `with` block, and `change(before)` afterwards."""
    change(value)
    try:
        yield
    finally:
        change(before)
