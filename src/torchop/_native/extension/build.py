"""Compile the extension. A file lock prevents two processes from compiling it at the same time."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from torchop._errors import NativeUnavailableError
from torchop._native.extension.recipe import (
    Recipe,
    compile_flags,
    find_compiler,
    include_flags,
    library_flags,
    link_flags,
)

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]

_LINES_OF_A_MESSAGE = 20
_BYTES_OF_A_MESSAGE = 8192
# This lock keeps other threads from forking while `subprocess.Popen` starts the compiler: a hook
# acquires it before each fork (`os.register_at_fork`). A child forked at that moment would inherit
# the write end of the pipe that Popen reads from, and Popen returns only when every process has
# closed its write end. If the child then waited for the file lock that this process holds, the two
# processes would deadlock.
_starting = threading.Lock()
# The lock files that are open in this process. A forked child closes its copies, because the
# operating system releases a lock only after all copies are closed. Otherwise a child that outlives
# this process would keep the lock forever.
_lock_files: set[IO[str]] = set()


def _close_lock_files() -> None:
    while _lock_files:
        _lock_files.pop().close()  # do not unlock, because the parent process holds the lock


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(
        before=_starting.acquire,
        after_in_parent=_starting.release,
        after_in_child=_starting.release,
    )
    os.register_at_fork(after_in_child=_close_lock_files)
_NICENESS = "10"  # keeps a compiler in the background from slowing down the user's program
# A function that is called with False when this process starts to compile, and with True when this
# process starts to wait for another process that compiles the same file.
Announce = Callable[[bool], None]


class Build:
    def __init__(self, recipe: Recipe, target: Path, *, background: bool = False) -> None:
        self._recipe = recipe
        self._compiler = find_compiler()  # raises if there is none
        self.target = target
        self._background = background
        self._stopped = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def is_stopped(self) -> bool:
        return self._stopped.is_set()

    def run_in_cache(self, announce: Announce, *, force: bool = False) -> None:
        """Acquire the file lock, and compile the file unless another process has compiled it."""
        with self._locked(announce) as is_alone:
            if self.target.exists() and not force:
                return
            announce(False)
            if is_alone:
                # Remove folders left behind by killed processes. Since this process holds the lock,
                # no other running process is using them.
                for folder in self.target.parent.glob(f"{self.target.name}.*.build"):
                    shutil.rmtree(folder, ignore_errors=True)
            self.run()

    def run(self) -> None:
        """Compile the file. An existing file is replaced atomically."""
        target = self.target
        try:
            # Do not use TemporaryDirectory, because a forked child would remove the folder when the
            # child exits.
            folder = tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".build", dir=target.parent)
        except OSError as error:
            raise NativeUnavailableError(
                f"the folder {target.parent} cannot be written to: {error.strerror}"
            ) from None
        try:
            # Compile all sources as one translation unit, because parsing PyTorch's headers takes
            # most of the time.
            whole, linked = Path(folder, "call_path.cpp"), Path(folder, target.name)
            sources = sorted(self._recipe.source.absolute().glob("*.cpp"))
            whole.write_text("".join(f'#include "{source}"\n' for source in sources), "utf-8")
            arguments = [
                *compile_flags(),
                *include_flags(),
                str(whole),
                *library_flags(),
                *link_flags(),
                "-o",
                str(linked),
            ]
            self._compile(arguments, Path(folder))
            with linked.open("rb") as file:
                # Without fsync, a power failure could leave an empty file with the final name.
                os.fsync(file.fileno())
            os.replace(linked, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        self._stopped.set()
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also kills the compiler's children

    def _compile(self, arguments: list[str], folder: Path) -> None:
        is_nice = self._background and shutil.which("nice") is not None
        nice = ["nice", "-n", _NICENESS] if is_nice else []
        # Write the output to a file and not to a pipe. A compiler cache such as sccache may start a
        # server that inherits the pipe and keeps it open.
        with open(folder / "output", "w+b") as output:
            try:
                with _starting:
                    process = self._process = subprocess.Popen(
                        [*nice, *self._compiler, *arguments],
                        # An empty entry in PATH or CPATH means the working directory. Run the
                        # compiler in this folder, so that it does not pick up files from the user's
                        # working directory.
                        cwd=folder,
                        env={**os.environ, "TMPDIR": str(folder)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # creates a process group for `stop` to kill
                    )
            except OSError as error:
                raise NativeUnavailableError(
                    f"the compiler {self._compiler[0]} cannot be run: {error.strerror}"
                ) from None
            try:
                if self.is_stopped:  # `stop` was called before `_process` was set
                    self._kill()
                code = process.wait()
            finally:
                self._kill()  # after an exception, such as Ctrl-C
                process.wait()
            if code != 0:
                output.seek(max(0, output.seek(0, os.SEEK_END) - _BYTES_OF_A_MESSAGE))
                text = output.read().decode("utf-8", "replace").strip()
                end = "\n".join(text.splitlines()[-_LINES_OF_A_MESSAGE:])
                problem = f"failed with exit code {code}"
                if code < 0:
                    problem = f"was killed by signal {-code} (signal 9 usually means out of memory)"
                raise NativeUnavailableError(
                    f"the compiler {self._compiler[0]} {problem}:\n"
                    f"{printable(end) or '(it printed nothing)'}"
                )

    @contextlib.contextmanager
    def _locked(self, announce: Announce) -> Iterator[bool]:
        """Hold the file lock of the target file. Yields False if the file system has no locks.

        If the process dies, the operating system releases the lock. The lock file is never removed,
        because otherwise two processes could lock two different files with the same name.
        """
        try:
            with _starting:  # so that no fork happens before the file is in the set
                file = open(f"{self.target}.lock", "w")  # noqa: SIM115  # closed below
                _lock_files.add(file)
        except OSError as error:
            raise NativeUnavailableError(
                f"the file {self.target}.lock cannot be written to: {error.strerror}"
            ) from None
        is_waiting = False
        try:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.is_stopped:
                        raise NativeUnavailableError("the program exited first") from None
                    if not is_waiting:
                        is_waiting = True
                        announce(True)
                    time.sleep(0.1)
                except OSError:
                    # Some network file systems do not support locks. Compiling without a lock is
                    # safe, because each process replaces the file atomically.
                    yield False
                    return
            try:
                yield True
            finally:
                # Unlock explicitly, because a child that C code has forked may have the file open.
                fcntl.flock(file, fcntl.LOCK_UN)
        finally:
            with _starting:
                _lock_files.discard(file)
                file.close()


def printable(text: str) -> str:
    """Return the last part of `text`, with control characters escaped."""
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text[-_BYTES_OF_A_MESSAGE:]
    )[-_BYTES_OF_A_MESSAGE:]
