"""Compile the extension once for all processes of a machine, under a lock in the cache folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

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
# Prevents forks while `subprocess.Popen` starts the compiler. A forked child would inherit the pipe
# that Popen reads until exec. Popen would wait for the child to exit, and the child may wait for
# the file lock that this process holds.
_starting = threading.Lock()
if hasattr(os, "register_at_fork"):  # there is no forking on Windows
    os.register_at_fork(
        before=_starting.acquire,
        after_in_parent=_starting.release,
        after_in_child=_starting.release,
    )
_NICENESS = "10"  # for a compiler in the background, so that the user's program runs first


class Build:
    """One compilation, which another thread can stop."""

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

    def run_in_cache(self, *, force: bool = False) -> None:
        """Take the lock and compile the file, unless it exists by then.

        Raises:
            NativeUnavailableError: the compiler failed, or `stop` was called.
        """
        with self._locked() as is_alone:
            if self.target.exists() and not force:
                return  # another process compiled it
            if is_alone:
                # These folders are left over from killed processes: a running one holds the lock.
                for folder in self.target.parent.glob(f"{self.target.name}.*.build"):
                    shutil.rmtree(folder, ignore_errors=True)
            self.run()

    def run(self) -> None:
        """Compile the file, and atomically replace an existing one.

        Raises:
            NativeUnavailableError: the compiler failed, or `stop` was called.
        """
        target = self.target
        try:
            # Not TemporaryDirectory: a forked child would remove the folder when it exits.
            folder = tempfile.mkdtemp(prefix=f"{target.name}.", suffix=".build", dir=target.parent)
        except OSError as error:
            raise NativeUnavailableError(
                f"the folder {target.parent} cannot be written to: {error.strerror}"
            ) from None
        try:
            # One translation unit for all sources, because compiling PyTorch's headers takes most
            # of the time.
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
                # Otherwise a power failure could leave an empty file under the final name.
                os.fsync(file.fileno())
            os.replace(linked, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def stop(self) -> None:
        """Stop the compiler or the wait for the lock; `run` then raises."""
        self._stopped.set()
        self._kill()

    def _kill(self) -> None:
        process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # including the compiler's children

    def _compile(self, arguments: list[str], folder: Path) -> None:
        is_nice = self._background and shutil.which("nice") is not None
        nice = ["nice", "-n", _NICENESS] if is_nice else []
        # Not a pipe: compiler caches such as ccache may start a server that keeps the pipe open.
        with open(folder / "output", "w+b") as output:
            try:
                with _starting:
                    process = self._process = subprocess.Popen(
                        [*nice, *self._compiler, *arguments],
                        # An empty entry in PATH or CPATH means the working directory, which must
                        # not be the user's.
                        cwd=folder,
                        env={**os.environ, "TMPDIR": str(folder)},
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,  # `stop` kills the process group
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
    def _locked(self) -> Iterator[bool]:
        """Hold the lock of the target; yield False if the file system does not support locks.

        The operating system releases the lock if the process dies. The lock file is never removed;
        otherwise two processes could lock two files of the same name.
        """
        try:
            opened = open(f"{self.target}.lock", "w")  # noqa: SIM115  # closed below
        except OSError as error:
            raise NativeUnavailableError(
                f"the file {self.target}.lock cannot be written to: {error.strerror}"
            ) from None
        with opened as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self.is_stopped:
                        raise NativeUnavailableError("the program exited first") from None
                    time.sleep(0.1)
                except OSError:
                    # Some network drives do not support locks. Compiling twice only wastes time,
                    # because each process replaces the file atomically.
                    yield False
                    return
            try:
                yield True
            finally:
                # Closing the file is not enough: a forked child shares the descriptor and the lock.
                fcntl.flock(file, fcntl.LOCK_UN)


def printable(text: str) -> str:
    """Return the end of a text, with control characters escaped."""
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text[-_BYTES_OF_A_MESSAGE:]
    )[-_BYTES_OF_A_MESSAGE:]
