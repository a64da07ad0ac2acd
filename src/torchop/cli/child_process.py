"""A process of its own for each operator, because its kernel may crash or hang.

The process is forked from a server that has only imported the modules which register the operators.
Unlike a fork of the program, it can use threads and accelerators, and holds none of the program's
locks. An operator that the program itself registers can be called only in a fork of the program,
and with one thread: OpenMP would wait forever for threads that a fork does not have.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch

START_LIMIT = 600.0  # seconds, for the imports of all the modules


class ChildError(Exception):
    """What a child process did instead of sending a message: "took over 60 seconds"."""


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
        one_thread = method == "fork"
        self._process = context.Process(
            target=_run, args=(sender, function, args, one_thread, output)
        )
        with contextlib.ExitStack() as stack:
            if method == "forkserver":
                stack.enter_context(_path_in_environment())
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
        self._process.kill()
        self._process.join()
        self._receiver.close()

    def receive(self, limit: float) -> Any:
        """The next message.

        Raises:
            ChildError: the process ended, or has sent none for `limit` seconds.
        """
        try:
            if not self._receiver.poll(limit):
                raise ChildError(f"took over {limit:.0f} seconds")
            return self._receiver.recv()
        except (OSError, EOFError):
            self._process.join()
            how = _how_ended(self._process.exitcode or 0)
            raise ChildError(f"ended the process, {how}") from None


def _how_ended(exit_code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-exit_code).name}"
    return f"with exit code {exit_code}"


@contextlib.contextmanager
def _path_in_environment() -> Iterator[None]:
    """Passes `sys.path` on to the server, which otherwise would not find the modules."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    try:
        yield
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


def _run(
    sender: Connection,
    function: Callable[..., Iterable[Any]],
    args: tuple[Any, ...],
    one_thread: bool,
    output: Path | None,
) -> None:
    if one_thread:
        torch.set_num_threads(1)
    if output is not None:
        with output.open("ab") as file:
            for descriptor in (1, 2):
                os.dup2(file.fileno(), descriptor)
        faulthandler.enable(2, all_threads=False)
    for message in function(*args):
        sender.send(message)
