"""Run a child process in a separate process group, and describe how it ended.

A kernel in the child may start further processes, such as a compiler. They belong to the same
group, so killing the group also kills them.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def enter() -> None:
    """Move this process into a new group, and on Linux make it exit when its parent exits."""
    os.setpgid(0, 0)
    if sys.platform == "linux":  # otherwise a child that hangs would outlive its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill(leader: int) -> None:
    """Kill all processes in the group of `leader`, the id of the process that called `enter`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_of(code: int) -> str:
    """Describe an exit code of `multiprocessing` or `os.waitstatus_to_exitcode`."""
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"
