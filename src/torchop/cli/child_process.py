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

START_LIMIT = 600.0  # seconds, for the imports of all the modules
# Bytes of the output of a child: more is thrown away, as a kernel that prints is called often.
_MOST_OUTPUT = 2**24
_TAIL = 2**16
_THREADS = "OMP_NUM_THREADS"
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class ChildError(Exception):
    """Why a child process sent no message, such as "took over 60 seconds"."""


def preload(modules: Iterable[str]) -> None:
    """Has the server import modules, if it was not started before."""
    multiprocessing.set_forkserver_preload([__name__, *sorted(set(modules))])


class Child:
    """A process that calls a generator function, and sends what it yields; a context manager.

    Args:
        method: whether it is a fork of the server, or of this program.
        function: the generator function, which is found by its name in the child.
        args: its arguments, which are pickled.
        output: the file that gets what the child writes, which would disturb a progress bar, and
            the traceback if it crashes. It stays where it is without one.

    Raises:
        OSError: no process can be started.
    """

    def __init__(
        self,
        method: Literal["forkserver", "fork"],
        function: Callable[..., Iterable[Any]],
        args: tuple[Any, ...],
        output: Path | None = None,
    ) -> None:
        context: Any = multiprocessing.get_context(method)
        self._receiver, sender = context.Pipe(duplex=False)
        self._output = output
        threads = 1 if method == "fork" else torch.get_num_threads()
        most_threads = os.environ.get(_THREADS)
        self._process = context.Process(
            target=_run, args=(sender, function, args, threads, most_threads, output)
        )
        with contextlib.ExitStack() as stack:
            if method == "forkserver":
                stack.enter_context(_environment_of_server())
            else:
                stack.enter_context(warnings.catch_warnings())
                # Python 3.12 warns of threads.
                warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._process.start()
            except EOFError as error:  # the server ended
                raise OSError(str(error)) from None
        sender.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exception: object) -> None:
        # With what it started, and did not end.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()
        self._receiver.close()

    def receive(self, limit: float) -> Any:
        """The next message.

        Raises:
            ChildError: the process ended, or has sent none for `limit` seconds.
        """
        end = time.monotonic() + limit
        while not self._receiver.poll():
            left = end - time.monotonic()
            if left <= 0:
                raise ChildError(f"took over {limit:.0f} seconds")
            # Its end has to be waited for, too: what it started may hold the pipe open.
            if (
                self._process.sentinel
                in wait([self._receiver, self._process.sentinel], min(left, 0.5))
                and not self._receiver.poll()
            ):
                raise self._end()
            self._shorten_output()
        try:
            return self._receiver.recv()
        except (OSError, EOFError):
            raise self._end() from None

    def _end(self) -> ChildError:
        self._process.join()
        return ChildError(f"ended the process, {_how_ended(self._process.exitcode or 0)}")

    def _shorten_output(self) -> None:
        with contextlib.suppress(OSError):
            if self._output is not None and self._output.stat().st_size > _MOST_OUTPUT:
                os.truncate(self._output, 0)  # it appends, so it goes on from there


def tail(output: Path) -> str:
    """The end of what a child wrote."""
    try:
        with output.open("rb") as file:
            file.seek(max(0, output.stat().st_size - _TAIL))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _how_ended(exit_code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


@contextlib.contextmanager
def _environment_of_server() -> Iterator[None]:
    """What the server finds in its environment, if it is started in this block.

    It gets `sys.path`, without which it would not find the modules. It may have one thread alone:
    where a module calls kernels when it is imported, OpenMP would start threads, and the forks,
    which have none of these, would wait for them.
    """
    names = {"PYTHONPATH": os.pathsep.join(sys.path), _THREADS: "1"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _run(
    sender: Connection,
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    threads: int,
    most_threads: str | None,
    output: Path | None,
) -> None:
    torch.set_num_threads(threads)
    _set_environment({_THREADS: most_threads})  # not the server's
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
    for message in function(*args):
        sender.send(message)
