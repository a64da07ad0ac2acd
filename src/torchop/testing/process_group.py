"""Run a child process in a process group of its own, and describe how it ended.

A kernel in the child may start processes, such as a compiler. They belong to the group, so killing
the group ends them too.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # from <sys/prctl.h>


def enter() -> None:
    """Move this process into a new group. On Linux, kill it when the parent ends."""
    os.setpgid(0, 0)
    if sys.platform == "linux":  # otherwise a child that hangs would outlive its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def kill(leader: int) -> None:
    """Kill all processes of a group. `leader` is the id of the process that called `enter`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_of(code: int) -> str:
    """Describe an exit code of `multiprocessing` or `os.waitstatus_to_exitcode`."""
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"
