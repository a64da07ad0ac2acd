"""The processes in which commands try operators, and the modules that register these."""

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

START_LIMIT = 600.0  # seconds, for the imports of all the modules


def preload(modules: Iterable[str]) -> None:
    """Has the server import modules, if it was not started before."""
    multiprocessing.set_forkserver_preload([__name__, *sorted(set(modules))])


def answers_of(
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    limit: float,
    modules: Iterable[str] = (),
    output: Path | None = None,
    method: Literal["forkserver", "fork"] = "forkserver",
) -> contextlib.AbstractContextManager[Iterator[Any]]:
    """What a generator function yields in another process, once that has imported modules.

    Args:
        limit: the seconds until it has to yield again, after the first time.
        modules: what the process imports first.
        method: whether the process is a fork of the program; others can use accelerators.

    The others are those of `testing._processes.answers`.

    Raises:
        ChildError: no process can be started; it ended, or has yielded nothing for too long.
        click.ClickException: a module cannot be imported, or the function raised it.
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
    """Imports modules; raises click.ClickException for one that cannot be."""
    for module in modules:
        path = Path(module.removesuffix(".py"))
        if not module.strip(".") or module != path.name:
            names = [path.name] if path.is_absolute() else path.parts
            name = ".".join(part for part in names if part.isidentifier() and part != "src")
            raise click.ClickException(
                f"{short_repr(module)} is not the name of a module; write the name by which it is "
                f"imported, such as {name or 'mypkg'}"
            )
        try:
            with _exit_is_told(module):
                importlib.import_module(module)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also SystemExit, and what pytest skips a module with
            problem = f"{short_text(module)} cannot be imported: {first_line(error)}"
            raise click.ClickException(problem + _raised_at(error)) from None


@contextlib.contextmanager
def _exit_is_told(module: str) -> Iterator[None]:
    """Has `os._exit` say where a module calls it: no exception and no `atexit` would tell."""
    leave, process = os._exit, os.getpid()

    def tell(status: int = 0) -> NoReturn:
        if os.getpid() != process:  # one that the module forked
            leave(status)
        place = sys._getframe(1)
        problem = f"it calls os._exit({status}) ({place.f_code.co_filename}:{place.f_lineno})"
        click.echo(f"Error: {short_text(module)} cannot be imported: {problem}", err=True)
        leave(1)  # 0 would say that the command did its work

    os._exit = tell
    try:
        yield
    finally:
        os._exit = leave


def _raised_at(error: BaseException) -> str:
    """Where a module raised it, in brackets; empty if none of its lines ran."""
    lines = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<frozen ")
    ]
    return lines[-1] if len(lines) > 2 else ""  # the first two are those that import it


@contextlib.contextmanager
def errors_told(what: str) -> Iterator[None]:
    """Ends the command where something in the block raises, and says what that was about."""
    try:
        yield
    except click.ClickException:
        raise
    except (Exception, SystemExit) as error:
        raise click.ClickException(f"{what}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    """The type of an exception, and the first line of what it says, made short."""
    text = str(error).strip().partition("\n")[0]
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
