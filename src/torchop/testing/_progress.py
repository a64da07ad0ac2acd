"""The bar on a terminal that shows how far checks and measurements are."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_bar() -> Iterator[Callable[[str, float, float], object]]:
    """A bar, on a terminal and with the package that draws it.

    Yields:
        What moves it: `show(description, done, total)`.
    """
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda description, done, total: None
        return
    # Only the extra torchop[cli] has it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn  # the same

    columns = (BarColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(description: str, done: float, total: float) -> None:
            bar.update(task, description=description, completed=done, total=total)

        yield show
