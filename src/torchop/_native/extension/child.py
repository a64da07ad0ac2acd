"""The process that compiles, as its parent sees it: started, waited for, and shown to the user."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import selectors
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from torchop._errors import NativeUnavailableError, short_repr
from torchop._native.extension import worker
from torchop._native.extension.recipe import (
    Recipe,
    compile_flags,
    find_compiler,
    include_flags,
    library_flags,
    link_flags,
)

_LIMIT = 600.0  # seconds, where TORCHOP_BUILD_TIMEOUT does not say
_GRACE = 60.0  # what the process may take beyond its own limits
_LENGTH_OF_A_MESSAGE = 1 << 16
_NICENESS = 10  # of a build in the background: the user's program comes first
# It is shorter than a line of a terminal: a longer one could not be written over.
_TEXT = "torchop: compiling its native call path, once"

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


def wait(process: subprocess.Popen[bytes]) -> None:
    """Waits for the process, and shows that it compiles if it does; raises why it failed."""
    notice = Notice()
    try:
        message = _read(process, notice, time.monotonic() + 2 * limit() + _GRACE)
        process.wait()
    except BaseException as error:  # Ctrl-C too, in the foreground
        _stop(process)
        notice.finish("stopped")
        if not isinstance(error, TimeoutError):
            raise
        raise NativeUnavailableError(str(error)) from None
    notice.finish("done" if process.returncode == 0 else "failed")
    if process.returncode < 0:
        raise NativeUnavailableError(
            f"the process that compiles was ended by signal {-process.returncode}; signal 9 "
            "usually means that memory ran out"
        )
    if process.returncode != 0:
        text = message.removeprefix(worker.COMPILING).decode("utf-8", "replace")
        raise NativeUnavailableError(worker.printable(text).strip())


def _read(process: subprocess.Popen[bytes], notice: Notice, deadline: float) -> bytes:
    """Reads what the process writes, until it ends, and counts the seconds."""
    assert process.stdout is not None
    message = b""
    with process.stdout as output, selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while True:
            if selector.select(timeout=1):
                block = os.read(output.fileno(), _LENGTH_OF_A_MESSAGE)
                if not block:
                    return message
                if not message and block.startswith(worker.COMPILING):
                    notice.start()
                message = (message + block)[-_LENGTH_OF_A_MESSAGE:]
            elif time.monotonic() > deadline:
                raise TimeoutError("the process that compiles did not end in time, and was stopped")
            notice.tick()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()  # it stops the compiler, and cleans up
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Notice:
    """The line on stderr about one build; on a terminal, it counts the seconds."""

    def __init__(self) -> None:
        self.counts = _is_terminal()
        self._started: float | None = None

    def start(self) -> None:
        """Shows the line."""
        with not_exiting:
            self._started = time.monotonic()
            if self.counts:
                self._write(f"{_TEXT} ...")
                atexit.register(self._leave)
            else:
                self._write(f"{_TEXT} (TORCHOP_NATIVE=0 turns it off)\n")

    def tick(self) -> None:
        """Writes the seconds that have passed, on a terminal."""
        with not_exiting:
            if self.counts and self._started is not None:
                self._write(f"\r{_TEXT} ... {time.monotonic() - self._started:.0f} s")

    def finish(self, outcome: str) -> None:
        """Ends the line, on a terminal: `done`, `failed`."""
        with not_exiting:
            if self.counts and self._started is not None:
                self.tick()
                self._write(f", {outcome}\n")
                self._started = None
                atexit.unregister(self._leave)

    def _leave(self) -> None:
        self.finish("goes on in the background")

    def _write(self, text: str) -> None:
        # A program may have closed its stderr, or have none, as with pythonw.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self.counts:
                # Not through Python's stream: a thread that is stopped would keep its lock.
                os.write(sys.stderr.fileno(), text.encode())
            else:
                sys.stderr.write(text)
                sys.stderr.flush()


def _is_terminal() -> bool:
    if hasattr(sys, "ps1"):
        return False  # a line that changes would overwrite the prompt that the user types at
    try:
        wide_enough = shutil.get_terminal_size().columns >= len(_TEXT) + 20
        return sys.stderr.isatty() and wide_enough
    except (OSError, ValueError, AttributeError):
        return False
