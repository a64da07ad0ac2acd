"""A fork of the program for what may crash it, or never come back.

A fork, because an operator that the program itself registers is in no module that another process
could import. It has one thread, as OpenMP would wait for threads that a fork does not have.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

Work = Callable[[], Iterable[Any]]
# Returns the next message, or an end, within so many seconds.
Receive = Callable[[float], Any]


class Ended(str):
    """How the process ended before it had sent everything; empty if it took too long."""


@contextlib.contextmanager
def forked(work: Work) -> Iterator[Receive]:
    """What a generator function yields in a fork, which ends with the block.

    Yields:
        A function that waits so many seconds for the next message. It returns `None` after the
        last one, and an `Ended` if there is none in time, or the process has ended.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(sender, work), daemon=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about threads
        process.start()
    sender.close()

    def receive(seconds: float) -> Any:
        ready = wait([receiver, process.sentinel], seconds)
        if not ready:
            return Ended()
        with contextlib.suppress(EOFError, OSError):
            if receiver.poll():
                return receiver.recv()
        process.join()
        code = process.exitcode or 0
        return Ended(f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}")

    try:
        yield receive
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)  # with what it started
        process.kill()
        process.join()
        receiver.close()


def _run(sender: Connection, work: Work) -> None:
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    silence = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(silence, descriptor)  # what kernels print is not for the caller
    faulthandler.disable()  # whose file is the caller's
    torch.set_num_threads(1)
    for message in work():
        sender.send(message)
    sender.send(None)
