"""The process that compiles, as its parent sees it: started, waited for, and shown to the user."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import multiprocessing
import os
import selectors
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torchop._errors import NativeUnavailableError, short_repr
from torchop._native.extension import worker
from torchop._native.extension.recipe import (
    CSRC,
    Recipe,
    compile_flags,
    find_compiler,
    include_flags,
    library_flags,
    link_flags,
)

_LIMIT = 600.0  # seconds, where TORCHOP_BUILD_TIMEOUT does not say
_GRACE = 120.0  # what the process may take beyond its own limits
_LONGEST_WAIT = 1e6  # a system refuses to wait for more than some weeks
_LENGTH_OF_A_MESSAGE = 1 << 16
_NICENESS = 10  # of a build in the background: the user's program comes first
NOTICE = (
    "torchop: compiling its native call path, once, which takes about 20 s. TORCHOP_NATIVE=0 turns "
    "this off."
)
NOTICE_IN_BACKGROUND = (
    "torchop: compiling its native call path, once, which takes about 20 s. Calls take longer "
    "until it is ready: call torchop.native.wait() before you time them. TORCHOP_NATIVE=0 turns "
    "this off."
)

# When the interpreter ends, it stops daemon threads wherever they are. One that is stopped while it
# writes to stderr aborts the process, and one that is stopped inside C++ unwinds through code that
# is not made for that. So a thread holds this lock while it loads the extension, or writes. At its
# end, the interpreter takes the lock for good, and a thread that wants it then waits forever.
not_exiting = threading.RLock()


@atexit.register
def _stop_threads() -> None:
    # With a time limit, so that a thread that hangs does not keep the program from ending.
    not_exiting.acquire(timeout=10)


if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(after_in_child=not_exiting._at_fork_reinit)  # type: ignore[attr-defined]


def limit() -> float:
    """How many seconds compiling may take, and waiting for another process that compiles."""
    value = os.environ.get("TORCHOP_BUILD_TIMEOUT") or _LIMIT
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0
    if not 0 < seconds < math.inf:
        raise NativeUnavailableError(
            f"the environment variable TORCHOP_BUILD_TIMEOUT is {short_repr(value)}, and must be "
            "a number of seconds, above 0"
        )
    return seconds


def start(
    recipe: Recipe,
    folder: Path,
    *,
    stale: list[int] | None = None,  # the `worker.identity` of a file that is to be replaced
    in_cache: bool = True,  # whether others may be building the same, and wait for one another
    background: bool = False,  # whether the process outlives this one, and Ctrl-C on the terminal
    retry: bool = False,  # whether to try although it failed not long ago
) -> subprocess.Popen[bytes]:
    """Starts the process, which builds into a folder."""
    if not sys.executable or getattr(sys, "frozen", False):
        # sys.executable is the program itself, which would start itself again and again.
        raise NativeUnavailableError(
            "Python is embedded in this program, so there is no Python executable to run the "
            "compiler from. Build with an ordinary Python, and set TORCHOP_NATIVE_DIR to the "
            "folder"
        )
    compiler = find_compiler()
    job = {
        "compiler": compiler.command,
        "flags": [*compile_flags(), *include_flags()],
        "link": [*library_flags(), *link_flags()],
        "sources": [str(source) for source in sorted(recipe.source.absolute().glob("*.cpp"))],
        "target": str(folder / recipe.file_name(compiler)),
        "stale": stale,
        "cache": in_cache,
        "niceness": _NICENESS if background else 0,
        "limit": limit(),
        "retry": retry,
        "parent": os.getpid(),
        # The ranks of a training job need not all say so.
        "tells": os.environ.get("LOCAL_RANK") in (None, "", "0")
        and multiprocessing.parent_process() is None,
        "trial": _trial() if recipe.source == CSRC else None,
    }
    # Without the user's site-packages and settings, which cost time and are not used.
    command = [sys.executable, "-I", "-S", worker.__file__, json.dumps(job)]
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=background,
        )
    except OSError as error:
        raise NativeUnavailableError(
            f"the process that compiles cannot be started: {error}"
        ) from None


def _trial() -> list[str]:
    """A program that loads the extension as this one would, in which a crash says where it was."""
    folders = [os.path.abspath(folder) for folder in sys.path if isinstance(folder, str)]
    load = (
        f"import os, sys; sys.path[:] = {folders!r}; os.environ['TORCHOP_NATIVE'] = 'prebuilt'; "
        "import torchop; torchop.native.wait(); os._exit(0)"  # other libraries may crash at the end
    )
    return [sys.executable, "-X", "faulthandler", "-c", load]


def wait(process: subprocess.Popen[bytes], notice: str = NOTICE) -> bool:
    """Waits for the process, and tells the user if it compiles, or waits for one that does.

    Args:
        process: what `start` returned.
        notice: what the user is told.

    Returns:
        Whether the user was told.

    Raises:
        NativeUnavailableError: why the process failed.
    """
    try:
        message = _read(process, time.monotonic() + 2 * limit() + _GRACE, notice)
        process.wait()
    except BaseException:  # Ctrl-C too, in the foreground
        _stop(process)
        raise
    if process.returncode < 0:
        raise NativeUnavailableError(
            f"the process that compiles was ended by signal {-process.returncode}; signal 9 "
            "usually means that memory ran out"
        )
    if process.returncode != 0:
        text = message.removeprefix(worker.COMPILING).decode("utf-8", "replace")
        raise NativeUnavailableError(worker.printable(text).strip())
    return message.startswith(worker.COMPILING)


def _read(process: subprocess.Popen[bytes], deadline: float, notice: str) -> bytes:
    """Reads what the process writes, until it ends."""
    assert process.stdout is not None
    message = b""
    with process.stdout as output, selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while selector.select(min(deadline - time.monotonic(), _LONGEST_WAIT)):
            block = os.read(output.fileno(), _LENGTH_OF_A_MESSAGE)
            if not block:
                return message
            if not message and block.startswith(worker.COMPILING):
                tell_user(notice)
            message = (message + block)[-_LENGTH_OF_A_MESSAGE:]
    raise NativeUnavailableError("the process that compiles did not end in time, and was stopped")


def tell_user(line: str) -> None:
    """Writes a line to stderr, in one piece, which is not put into a line of the program."""
    # A program may have closed its stderr, or have none, as with pythonw.
    with not_exiting, contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"{_to_an_empty_line(sys.stderr)}{line}\n")
        sys.stderr.flush()


def _to_an_empty_line(stream: Any) -> str:
    """What moves the cursor of a terminal to an empty line, if it is not at the start of one.

    The program may be in the middle of a line, such as that of a progress bar, which a carriage
    return would let us write over. As many spaces as fit into a line end in the next line if the
    cursor was not at the start of its own, and otherwise go no further than the end.
    """
    try:
        columns = os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError, AttributeError):
        return ""  # a file, or what a notebook shows
    return " " * columns + "\r" if columns else "\n"


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # it stops the compiler, and cleans up
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
