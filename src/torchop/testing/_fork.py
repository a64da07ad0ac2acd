"""Call a function in a forked process, because a kernel may crash or hang.

A forked process starts in milliseconds and inherits all operators that the program has defined. It
calls the function in a new thread, because OpenMP would hang in the main thread: OpenMP uses a
separate thread pool for each calling thread, and a fork does not copy the threads of the pool, so
the main thread would wait for them forever.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchop._compat import devices
from torchop.testing import process_group


def can_fork() -> bool:
    """Return whether a forked process could run kernels.

    CUDA and other accelerators do not work in forks of a process that already uses them.
    """
    accelerator = devices.accelerator()
    return hasattr(os, "fork") and (accelerator is None or not accelerator.is_in_use())


class WorkerError(RuntimeError):
    """Raised if the worker process crashed, hung, or raised an exception outside a check."""


class Worker:
    """A forked process that calls `answer(request)` for each request and returns the result.

    If a request crashes the process, `ask` raises WorkerError. The next request then starts a new
    process.

    Args:
        answer: the function to call in the process. Its results must be picklable.
    """

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self._answer = answer
        self._folder = tempfile.TemporaryDirectory(prefix="torchop-")
        self.call_file = Path(self._folder.name, "call")
        self._process = 0
        self._pipe: Connection | None = None

    def ask(self, request: Any, limit: float) -> Any:
        """Return the answer to a request, or kill the process after `limit` seconds."""
        if self._pipe is None:
            self._start()
        assert self._pipe is not None
        try:
            self._pipe.send(request)
            if not self._pipe.poll(limit):
                raise WorkerError(f"took over {limit:g} seconds")
            answer, error = self._pipe.recv()
        except (EOFError, OSError):
            raise WorkerError(f"ended the process{self._end()}") from None
        except BaseException:
            self._end()
            raise
        if error is not None:
            raise WorkerError(error)
        return answer

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        ours, theirs = multiprocessing.Pipe()
        with warnings.catch_warnings():
            # Since Python 3.12, forking a process with several threads emits a DeprecationWarning.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if not process:
            with contextlib.suppress(BaseException):
                ours.close()
                _serve(theirs, self._answer, self.call_file)
            os._exit(0)
        theirs.close()
        self._process, self._pipe = process, ours

    def _end(self) -> str:
        """Kill the process and all processes that it started, and describe how it ended."""
        if self._pipe is None:
            return ""
        pipe, self._pipe = self._pipe, None
        pipe.close()
        process, status = os.waitpid(self._process, os.WNOHANG)
        if not process:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self._process, signal.SIGKILL)
            status = os.waitpid(self._process, 0)[1]
        process_group.kill(self._process)
        return f" {process_group.end_of(os.waitstatus_to_exitcode(status))}"


def _serve(pipe: Connection, answer: Callable[[Any], Any], call_file: Path) -> None:
    process_group.enter()
    process = os.getpid()
    # Write the traceback of a crash to a file, so that the parent process can print it.
    crash = os.open(crash_file(call_file), os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    faulthandler.enable(crash, all_threads=False)

    def serve() -> None:
        while True:
            try:
                request = pipe.recv()
            except EOFError:
                return
            message: tuple[Any, str | None]
            try:
                message = answer(request), None
            except BaseException as error:
                message = None, f"{type(error).__name__}: {error}"
            if os.getpid() != process:  # a child that a kernel forked must not continue here
                os._exit(1)
            pipe.send(message)

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()


def crash_file(call_file: Path) -> Path:
    return call_file.with_name(f"{call_file.name}.crash")
