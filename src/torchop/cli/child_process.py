"""A process of its own for each operator, because its kernel may crash or hang.

The process is forked from a server that has only imported the modules which register the operators.
Unlike a fork of the program, it can use threads and accelerators, and holds none of the program's
locks. An operator that the program itself registers can be called only in a fork of the program,
and with one thread: OpenMP would wait forever for threads that a fork does not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import signal
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

from torchop.extend import short_repr, short_text
from torchop.testing.process_state import set_environment

START_LIMIT = 600.0  # seconds, for the imports of all the modules
# Bytes of the output of a child: more is thrown away, as a kernel that prints is called often.
_MOST_OUTPUT = 2**24
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class ChildError(click.ClickException):
    """Why a child process went no further: what it was doing, and the problem with that."""

    def __init__(self, doing: str, problem: str) -> None:
        super().__init__(f"{doing} {problem}")
        self.problem = problem


def preload(modules: Iterable[str]) -> None:
    """Has the server import modules, if it was not started before."""
    multiprocessing.set_forkserver_preload([__name__, *sorted(set(modules))])


@contextlib.contextmanager
def answers(
    method: Literal["forkserver", "fork"],
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    limit: float,
    modules: Iterable[str] = (),
    output: Path | None = None,
) -> Iterator[Iterator[Any]]:
    """What a generator function yields in another process, which ends with the block.

    The iterator leaves out strings: such a string tells what the function does next, for errors.

    Args:
        method: whether the process is a fork of the server, or of this program.
        function: the generator function, which is found by its name in the child.
        args: its arguments, which are pickled.
        limit: the seconds until it has to yield again, once the modules are imported.
        modules: what the child imports first.
        output: the file that gets what the child writes, which would disturb a progress bar, and
            the traceback if it crashes. It stays where it is without one.

    Raises:
        ChildError: no process can be started; it ended, or has yielded nothing for too long.
        click.ClickException: a module cannot be imported, or the function raised it.
    """
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    threads = 1 if method == "fork" else torch.get_num_threads()
    start = sender, function, args, modules, threads, dict(os.environ), output
    process = context.Process(target=_run, args=start)
    with contextlib.ExitStack() as stack:
        if method == "forkserver":
            stack.enter_context(_environment_of_server())
        else:
            stack.enter_context(warnings.catch_warnings())
            # Python 3.12 warns of threads.
            warnings.simplefilter("ignore", DeprecationWarning)
        try:
            process.start()
        except (OSError, EOFError) as error:  # EOFError: the server ended
            problem = f"can be started for it ({first_line(error)})"
            raise ChildError("no process", problem) from None
    sender.close()
    try:
        yield _received(process, receiver, limit, output)
    finally:
        # With what it started, and did not end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        receiver.close()


def _received(
    process: Any, receiver: Connection, limit: float, output: Path | None
) -> Iterator[Any]:
    doing, seconds = "importing what registers it", START_LIMIT
    while True:
        if problem := _problem_of(process, receiver, seconds, output):
            raise ChildError(doing, problem)
        try:
            message = receiver.recv()
        except (OSError, EOFError):
            raise ChildError(doing, _end_of(process)) from None
        seconds = limit
        if isinstance(message, StopIteration):
            return
        if isinstance(message, click.ClickException):
            raise message
        if isinstance(message, str):
            doing = message
        else:
            yield message


def _problem_of(process: Any, receiver: Connection, seconds: float, output: Path | None) -> str:
    """Why there is no next message; empty once there is one."""
    end = time.monotonic() + seconds
    while not receiver.poll():
        left = end - time.monotonic()
        if left <= 0:
            return f"took over {seconds:.0f} seconds"
        # Its end has to be waited for, too: what it started may hold the pipe open.
        ready = wait([receiver, process.sentinel], min(left, 0.5))
        if process.sentinel in ready and not receiver.poll():
            return _end_of(process)
        with contextlib.suppress(OSError):
            if output is not None and output.stat().st_size > _MOST_OUTPUT:
                os.truncate(output, 0)  # the child appends, so it goes on from there
    return ""


def _end_of(process: Any) -> str:
    process.join()
    how = f"with exit code {process.exitcode}"
    with contextlib.suppress(ValueError):
        how = f"by {signal.Signals(-process.exitcode).name}"
    return f"ended the process, {how}"


@contextlib.contextmanager
def _environment_of_server() -> Iterator[None]:
    """What the server finds in its environment, if it is started in this block.

    It gets `sys.path`, without which it would not find the modules. It may have one thread alone:
    where a module calls kernels when it is imported, OpenMP would start threads, and the forks,
    which have none of these, would wait for them.
    """
    before = dict(os.environ)
    os.environ.update(PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    try:
        yield
    finally:
        set_environment(before)


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


def first_line(error: BaseException) -> str:
    """The type of an exception, and the first line of what it says, made short."""
    text = str(error).strip().partition("\n")[0]
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


# --------------------------------------------------------------------------------------------------
# In the child


def _run(
    sender: Connection,
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    modules: Iterable[str],
    threads: int,
    environment: Mapping[str, str],
    output: Path | None,
) -> None:
    torch.set_num_threads(threads)
    set_environment(environment)  # not the server's
    os.setpgid(0, 0)  # so that what it starts can be ended with it
    if sys.platform == "linux":  # where it hangs, it is to end with the server, and that with us
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # of all processes, this one is to end if memory runs out
    if output is not None:
        with output.open("ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        faulthandler.enable(2, all_threads=False)
    try:
        import_all(modules)
        for message in function(*args):
            sender.send(message)
    except click.ClickException as error:
        sender.send(error)
    else:
        sender.send(StopIteration())
