"""Warnings that point at the user's line, however deep in torchop they arise."""

from __future__ import annotations

import inspect
import warnings
from typing import NamedTuple


def warn(message: str, category: type[Warning]) -> None:
    """Warns as if the first frame outside torchop had called `warnings.warn`."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").startswith("torchop."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


class Place(NamedTuple):
    """A line of the user's program, to warn about later."""

    file: str
    line: int
    module: str


def users_place() -> Place:
    """The line of the first frame outside torchop."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_back is not None:
        name = frame.f_globals.get("__name__", "")
        if name != "torchop" and not name.startswith(("torchop.", "importlib.")):
            break
        frame = frame.f_back
    assert frame is not None
    return Place(frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__", ""))


def warn_at(place: Place, message: str, category: type[Warning]) -> None:
    """Warns from another thread, as if a line of the user's had called `warnings.warn`."""
    warnings.warn_explicit(message, category, place.file, place.line, module=place.module)
