"""Warnings that point at the user's line, however deep in torchop they arise."""

from __future__ import annotations

import inspect
import warnings


def warn(message: str, category: type[Warning]) -> None:
    """Warns as if the first frame outside torchop had called `warnings.warn`."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torchop."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)
