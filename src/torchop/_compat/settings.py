"""What is put back after a call, or taken back if it fails, whatever is raised in between.

A signal handler may raise between any two steps of Python: in the `__enter__` and `__exit__` of a
context manager as well. A generator that such an exception leaves behind is closed by whoever drops
the traceback, and would put its settings back in the middle of something else. So these functions
take what is to run, and put settings back themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

Result = TypeVar("Result")


class Setting(NamedTuple):
    """A function that sets something, what it is to be, and what it was."""

    change: Callable[[Any], object]
    value: Any
    before: Any


def run_with(settings: Sequence[Setting], run: Callable[[], Result]) -> Result:
    """Returns what `run` returns with these settings."""
    rest = list(settings)
    try:
        try:
            for setting in settings:
                setting.change(setting.value)
            return run()
        finally:
            _put_back(rest)
    finally:
        _put_back(rest)  # what is left of it, if an exception came in between


def undone(run: Callable[[], Result], undo: Callable[[], object]) -> Result:
    """Returns what `run` returns; if it raises, takes `undo`, which is safe to repeat."""
    try:
        return run()
    except BaseException:
        try:
            undo()
        except BaseException:
            undo()
            raise
        raise


def _put_back(rest: list[Setting]) -> None:
    while rest:
        rest[-1].change(rest[-1].before)
        rest.pop()
