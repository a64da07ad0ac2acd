"""Run commands on operators in child processes, and import modules that register operators."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from torchop.extend import short_repr, short_text
from torchop.testing import _processes

START_LIMIT = 600.0  # seconds for all imports


def preload(modules: Iterable[str]) -> None:
    """Make the forkserver import modules, unless it is already running."""
    multiprocessing.set_forkserver_preload([__name__, *sorted(set(modules))])


def answers_of(
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    limit: float,
    modules: Iterable[str] = (),
    output: Path | None = None,
    method: Literal["forkserver", "fork"] = "forkserver",
) -> contextlib.AbstractContextManager[Iterator[Any]]:
    """Yield the values of a generator function that runs in a child process.

    Args:
        function: the generator function.
        args: its arguments.
        limit: the seconds until each value after the first.
        modules: modules to import in the child process first.
        output: see `testing._processes.answers`.
        method: "fork" copies this process, and cannot use accelerators; "forkserver" can.

    Raises:
        ChildError: the process could not be started, exited, or exceeded the limit.
        click.ClickException: a module cannot be imported, or the function raised this.
    """
    limits = itertools.chain([START_LIMIT], itertools.repeat(limit))
    started = tuple(modules), function, args
    start = _processes.method_for_modules() if method == "forkserver" else method
    return _processes.answers(start, _after_imports, started, limits, click.ClickException, output)


def _after_imports(
    modules: Iterable[str], function: Callable[..., Iterable[Any]], args: tuple[Any, ...]
) -> Iterator[Any]:
    import_all(modules)
    yield from function(*args)


def import_all(modules: Iterable[str]) -> None:
    """Import modules, or raise click.ClickException."""
    for module in modules:
        path = Path(module.removesuffix(".py"))
        if not module.strip(".") or module != path.name:
            names = [path.name] if path.is_absolute() else path.parts
            name = ".".join(part for part in names if part.isidentifier() and part != "src")
            raise click.ClickException(
                f"{short_repr(module)} is not the name of a module. Pass the name to import, such "
                f"as {name or 'mypkg'}"
            )
        try:
            with _report_exit(module):
                importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # including SystemExit and the exception of pytest.skip
            problem = f"{short_text(module)} cannot be imported: {first_line(error)}"
            raise click.ClickException(problem + _raised_at(error)) from None


@contextlib.contextmanager
def _report_exit(module: str) -> Iterator[None]:
    """Report calls of `os._exit` in the block, which otherwise exits without any message."""
    leave, process = os._exit, os.getpid()

    def report(status: int = 0) -> NoReturn:
        if os.getpid() != process:  # in a process that the module forked
            leave(status)
        place = sys._getframe(1)
        problem = f"it calls os._exit({status}) ({place.f_code.co_filename}:{place.f_lineno})"
        click.echo(f"Error: {short_text(module)} cannot be imported: {problem}", err=True)
        leave(1)  # never 0, because the command did not finish

    os._exit = report
    try:
        yield
    finally:
        os._exit = leave


def _raised_at(error: BaseException) -> str:
    """Return the file and line in a module that raised, in parentheses; empty if none of it ran."""
    lines = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<frozen ")
    ]
    return lines[-1] if len(lines) > 2 else ""  # the first two are in this file and importlib


@contextlib.contextmanager
def report_errors(what: str) -> Iterator[None]:
    """Convert an exception in the block to a click.ClickException that starts with `what`."""
    try:
        yield
    except click.ClickException:
        raise
    except (Exception, SystemExit) as error:
        raise click.ClickException(f"{what}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """Return the type of an exception and the first line of its message, shortened."""
    text = str(error).strip().partition("\n")[0]
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
