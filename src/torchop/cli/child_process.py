"""Run a generator function in a child process, because kernels may crash or hang.

There are three ways to start the child:

- Usually, the child is forked from multiprocessing's forkserver, a process that only imports the
  modules that register operators. Unlike a fork of the program itself, a fork of the forkserver can
  use threads and accelerators, and inherits no locks.
- If importing a module initializes CUDA, forks of the forkserver cannot use CUDA. In this case, the
  child is a new process that imports the modules itself.
- If the child needs operators that the program itself defines, the child is a fork of the program.
  It uses one thread, because OpenMP deadlocks in a fork that uses more threads.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, NoReturn

import click
import torch

from torchop._compat import devices
from torchop.extend import short_repr, short_text
from torchop.testing import process_group
from torchop.testing.process_state import set_environment

START_LIMIT = 600.0  # the time limit for all imports, in seconds


class ChildError(RuntimeError):
    """The child process could not be started, exited, or exceeded the time limit."""


def preload(modules: Iterable[str]) -> None:
    """Make the forkserver import modules when it starts, unless it is already running."""
    multiprocessing.set_forkserver_preload([__name__, *sorted(set(modules))])


def answers_of(
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    limit: float,
    modules: Iterable[str] = (),
    method: Literal["forkserver", "fork"] = "forkserver",
) -> contextlib.AbstractContextManager[Iterator[Any]]:
    """Run a generator function in a child process, and yield its values in a `with` block.

    Strings that the function yields are not passed to the caller. Instead, each string describes
    the next step, such as "a call with x=...", and is used in the error message if that step
    crashes or hangs.

    `function` must be picklable. `limit` is the time limit in seconds for each value after the
    first. The child first imports `modules`. With the method "fork", the child also has the
    operators that this process defines, but cannot use accelerators.

    Raise ChildError if the child could not be started, exited, or exceeded the limit.
    """
    started = tuple(modules), function, args
    start = _method_for_modules() if method == "forkserver" else method
    return _answers(start, _after_imports, started, limit)


def _after_imports(
    modules: Iterable[str], function: Callable[..., Iterable[Any]], args: tuple[Any, ...]
) -> Iterator[Any]:
    import_all(modules)
    yield from function(*args)


@functools.cache
def _method_for_modules() -> Literal["forkserver", "spawn"]:
    """Return "spawn" if forks of the forkserver cannot use the accelerator, else "forkserver"."""
    if devices.accelerator() is None:
        return "forkserver"
    try:
        with _answers("forkserver", _is_in_bad_fork, (), START_LIMIT) as messages:
            return "spawn" if next(messages) else "forkserver"
    except Exception:
        return "spawn"


def _is_in_bad_fork() -> Iterator[bool]:
    accelerator = devices.accelerator()
    yield accelerator is not None and accelerator.is_in_bad_fork()


@contextlib.contextmanager
def _answers(
    method: Literal["forkserver", "spawn", "fork"],
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    limit: float,
) -> Iterator[Iterator[Any]]:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    threads = 1 if method == "fork" else torch.get_num_threads()
    start = sender, function, args, threads, dict(os.environ)
    process = context.Process(target=_run, args=start)
    around = contextlib.nullcontext() if method == "fork" else _environment_of_server()
    with warnings.catch_warnings(), around:
        # Hide Python 3.12's warning about forking a program with several threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            process.start()
        except (OSError, EOFError) as error:  # EOFError: the forkserver exited
            raise ChildError(
                f"no process could be started: {type(error).__name__}: {error}"
            ) from None
    sender.close()
    try:
        yield _received(process, receiver, limit)
    finally:
        # Kill the child's whole process group, which includes the processes that the child started.
        process_group.kill(process.pid)
        process.kill()
        process.join()
        receiver.close()


def _received(process: Any, receiver: Connection, limit: float) -> Iterator[Any]:
    doing = "importing what registers it"
    for seconds in itertools.chain([START_LIMIT], itertools.repeat(limit)):
        _wait(process, receiver, doing, seconds)
        try:
            message = receiver.recv()
        except (OSError, EOFError):
            raise ChildError(f"{doing} {_exit_of(process)}") from None
        if isinstance(message, StopIteration):
            return
        if isinstance(message, Exception):
            raise message
        if isinstance(message, str):
            doing = message
        else:
            yield message


def _wait(process: Any, receiver: Connection, doing: str, seconds: float) -> None:
    """Wait until the child sends a message. Raise ChildError if the child exits or is too slow."""
    end = time.monotonic() + seconds
    while not receiver.poll():
        left = end - time.monotonic()
        if left <= 0:
            raise ChildError(f"{doing} took over {seconds:.0f} seconds")
        # Also wait for the child to exit. The pipe alone does not report the exit if processes that
        # the child started keep the pipe open.
        ready = wait([receiver, process.sentinel], left)
        if process.sentinel in ready and not receiver.poll():
            raise ChildError(f"{doing} {_exit_of(process)}")


def _exit_of(process: Any) -> str:
    process.join()
    return f"ended the process, {process_group.end_of(process.exitcode)}"


@contextlib.contextmanager
def _environment_of_server() -> Iterator[None]:
    """Set environment variables for the forkserver, in case it starts in this block.

    The forkserver needs `sys.path` to find the modules. It must use one thread, because a module
    may call kernels when it is imported: with more threads, OpenMP would start a thread pool, and
    forks of the forkserver would wait forever for threads that they did not inherit.
    """
    before = dict(os.environ)
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        set_environment(before)


def _run(
    sender: Connection,
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    threads: int,
    environment: Mapping[str, str],
) -> None:
    torch.set_num_threads(threads)
    set_environment(environment)  # instead of the environment of the forkserver
    process_group.enter()
    try:
        for message in function(*args):
            sender.send(message)
    except click.ClickException as error:
        sender.send(error)
    else:
        sender.send(StopIteration())


# --------------------------------------------------------------------------------------------------
# Imports


def import_all(modules: Iterable[str]) -> None:
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
        except BaseException as error:  # includes SystemExit, and the exception of pytest.skip
            problem = f"{short_text(module)} cannot be imported: {first_line(error)}"
            raise click.ClickException(problem + _raised_at(error)) from None


@contextlib.contextmanager
def _report_exit(module: str) -> Iterator[None]:
    """Print a message if `os._exit` is called in the block, since Python would exit silently."""
    leave, process = os._exit, os.getpid()

    def report(status: int = 0) -> NoReturn:
        if os.getpid() != process:  # in a process that the module forked, os._exit is harmless
            leave(status)
        place = sys._getframe(1)
        problem = f"it calls os._exit({status}) ({place.f_code.co_filename}:{place.f_lineno})"
        click.echo(f"Error: {short_text(module)} cannot be imported: {problem}", err=True)
        leave(1)  # even if `status` is 0, because the command did not finish

    os._exit = report
    try:
        yield
    finally:
        os._exit = leave


def _raised_at(error: BaseException) -> str:
    """Return " (file:line)" of the code that raised, or "" if it is not in an imported module."""
    lines = [
        f" ({frame.f_code.co_filename}:{line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.startswith("<frozen ")
    ]
    return lines[-1] if len(lines) > 2 else ""  # the first two are in this file and importlib


@contextlib.contextmanager
def report_errors(what: str) -> Iterator[None]:
    """Convert exceptions in the `with` block to a ClickException that starts with `what`."""
    try:
        yield
    except click.ClickException:
        raise
    except (Exception, SystemExit) as error:
        raise click.ClickException(f"{what}: {first_line(error)}") from None


def first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__
