"""A process of its own for what may crash or hang, such as a kernel.

The process is forked from a server that has only imported the modules which register the operators.
Unlike a fork of the program, it can use threads and accelerators, and holds none of the program's
locks. Where such a module has used CUDA, or has only asked whether there is any, no fork of the
server can use it. Then the process is a new one, which imports the modules itself.

An operator that the program itself registers can be called only in a fork of the program, and with
one thread: OpenMP would wait forever for threads that a fork does not have.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from torchop._compat import devices
from torchop.testing.process_state import set_environment

# Bytes of the output of a child: more is thrown away, as a kernel that prints is called often.
_MOST_OUTPUT = 2**24
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class ChildError(RuntimeError):
    """Why a child process went no further: what it was doing, and the problem with that."""

    def __init__(self, doing: str, problem: str) -> None:
        super().__init__(f"{doing} {problem}")
        self.problem = problem


@contextlib.contextmanager
def answers(
    method: Literal["forkserver", "spawn", "fork"],
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    limits: Iterator[float],
    errors: type[Exception],
    output: Path | None = None,
) -> Iterator[Iterator[Any]]:
    """What a generator function yields in another process, which ends with the block.

    The iterator leaves out strings: such a string tells what the function does next, for errors.

    Args:
        method: whether the process is a fork of the server, a new one, or a fork of this program.
        function: the generator function, which the server finds by its name.
        args: its arguments, which the server gets pickled.
        limits: the seconds until it has to yield, for each time.
        errors: exceptions of the function that are raised here; others end its process.
        output: the file that gets what the child writes, which would disturb a progress bar, and
            the traceback if it crashes. It stays where it is without one.

    Raises:
        ChildError: no process can be started; it ended, or has yielded nothing for too long.
    """
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    threads = 1 if method == "fork" else torch.get_num_threads()
    start = sender, function, args, errors, threads, dict(os.environ), output
    process = context.Process(target=_run, args=start)
    around = contextlib.nullcontext() if method == "fork" else _environment_of_server()
    with warnings.catch_warnings(), around:
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for forks and threads
        try:
            process.start()
        except (OSError, EOFError) as error:  # EOFError: the server ended
            problem = f"can be started for it ({type(error).__name__}: {error})"
            raise ChildError("no process", problem) from None
    sender.close()
    try:
        yield _received(process, receiver, limits, output)
    finally:
        # With what it started, and did not end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        receiver.close()


@functools.cache
def method_for_modules() -> Literal["forkserver", "spawn"]:
    """How to start a process that imports modules: as a fork of the server if that is of use.

    One fork is asked whether it could use accelerators. Its failure is an answer as well, so that
    no other has to be waited for.
    """
    if devices.accelerator() is None:
        return "forkserver"
    try:
        with answers("forkserver", _is_in_bad_fork, (), iter([600.0]), Exception) as messages:
            return "spawn" if next(messages) else "forkserver"
    except Exception:
        return "spawn"


def _is_in_bad_fork() -> Iterator[bool]:
    accelerator = devices.accelerator()
    yield accelerator is not None and accelerator.is_in_bad_fork()


def _received(
    process: Any, receiver: Connection, limits: Iterator[float], output: Path | None
) -> Iterator[Any]:
    doing = "importing what registers it"
    for seconds in limits:
        _wait(process, receiver, doing, seconds, output)
        try:
            message = receiver.recv()
        except (OSError, EOFError):
            raise ChildError(doing, _end_of(process)) from None
        if isinstance(message, StopIteration):
            return
        if isinstance(message, Exception):
            raise message
        if isinstance(message, str):
            doing = message
        else:
            yield message


def _wait(
    process: Any, receiver: Connection, doing: str, seconds: float, output: Path | None
) -> None:
    """Waits for the next message; raises ChildError if there is none."""
    end = time.monotonic() + seconds
    while not receiver.poll():
        left = end - time.monotonic()
        if left <= 0:
            raise ChildError(doing, f"took over {seconds:.0f} seconds")
        # Its end has to be waited for, too: what it started may hold the pipe open.
        ready = wait([receiver, process.sentinel], min(left, 0.5))
        if process.sentinel in ready and not receiver.poll():
            raise ChildError(doing, _end_of(process))
        with contextlib.suppress(OSError):
            if output is not None and output.stat().st_size > _MOST_OUTPUT:
                os.truncate(output, 0)  # the child appends, so it goes on from there


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


# --------------------------------------------------------------------------------------------------
# In the child


def _run(
    sender: Connection,
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    errors: type[Exception],
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
        for message in function(*args):
            sender.send(message)
    except errors as error:
        sender.send(error)
    else:
        sender.send(StopIteration())
