"""The program that compiles: run by path, in a process of its own, with a job in JSON.

It imports nothing but the standard library, because importing torchop would import PyTorch, which
takes longer than some compilations. If its parent ends first while it compiles, it finishes anyway,
for the next program; but everything it does has a limit of time, and when it is stopped, it stops
the compiler and leaves nothing behind.

It writes one line when it starts to compile, or to wait for another process that compiles: its
parent tells the user. Then, if it fails, it writes why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]

COMPILING = b"compiling\n"
_LINES_OF_A_MESSAGE = 20
_BYTES_OF_A_MESSAGE = 8192
_BYTES_OF_A_COMPILER = 7168  # which leaves room for what is said around it
_LONGEST_TRIAL = 60.0  # seconds, after which nothing is known of the extension
_SECONDS_OF_A_FAILURE = 24 * 60 * 60  # after which what failed is tried again
# How a process ends that runs into a fault of its own, and not because somebody ends it.
_CRASHES = frozenset({signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE, signal.SIGBUS})
_SIGNALS = (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))


class BuildError(Exception):
    """The compiler failed, or could not be started."""


class Stopped(BaseException):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        self.number = number


def failure_record(target: Path) -> Path:
    """The file that says why the last build of `target`, or loading what it built, failed."""
    return target.with_name(f"{target.name}.failure")


def remembered_failure(target: Path) -> str | None:
    """Why a build within the last day failed; None if none did.

    Older ones do not count: what was missing may be there, such as room on the disk.
    """
    record = failure_record(target)
    try:
        age = time.time() - record.stat().st_mtime
        with record.open("rb") as file:
            text = file.read(_BYTES_OF_A_MESSAGE).decode("utf-8", "replace")
    except OSError:
        return None
    return printable(text) if abs(age) < _SECONDS_OF_A_FAILURE else None


def digest(descriptor: int) -> str:
    """The digest of an open file."""
    contents = hashlib.sha256()
    offset = 0
    # In blocks that fit into memory that the process has already: new pages cost more than hashing.
    while block := os.pread(descriptor, 1 << 16, offset):
        contents.update(block)
        offset += len(block)
    return contents.hexdigest()


def digest_file(target: Path) -> Path:
    """The file that holds the digest of `target`."""
    return target.with_name(f"{target.name}.digest")


def expected_digest(target: Path) -> str | None:
    """The digest of what the compiler made; None if it was not kept."""
    try:
        # As bytes: to import the codec of ASCII would take longer than to read the file.
        with digest_file(target).open("rb") as file:
            return file.read(100).decode("utf-8", "replace").strip()
    except OSError:
        return None


def identity(file: Path) -> list[int] | None:
    """What tells a file from one that replaces it; None if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return [status.st_ino, status.st_mtime_ns]


def printable(text: str, size: int = _BYTES_OF_A_MESSAGE) -> str:
    """The end of a text, at most `size` bytes, with escapes for what would control a terminal."""
    escaped = "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text[-size:]
    )
    return escaped.encode()[-size:].decode("utf-8", "ignore")


def main(job: dict[str, Any]) -> int:
    """Does a job.

    Args:
        job: `compiler`, `flags` and `link` are parts of the command, in this order; `sources` are
            files; `target` is the file to make. One that is there already is kept, except the
            `stale` one. In a `cache`, processes wait for one another, and nobody else may read.
            `niceness` is by how much other programs go first. `limit` is how many seconds
            compiling may take, and waiting for another process that compiles. `retry` says
            whether to try although it failed before. `parent` is the process that asks, and
            `tells` says whether its user is told that another process compiles. `trial` is a
            command that loads the extension from `TORCHOP_NATIVE_DIR`, if it can be tried.
    """
    target = Path(job["target"])
    try:
        for number in _SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                signal.signal(number, _stop)
        os.nice(job["niceness"])
        if not job["cache"]:
            _say(COMPILING)
            _build(job, target, mode=0o755)
            return 0
        os.umask(0o077)
        with _locked(job, target) as waited:
            _build_in_cache(job, target, waited)
    except (BuildError, OSError) as error:
        _say(printable(str(error)).encode())
        return 1
    except Stopped as stopped:
        for folder in target.parent.glob(f"*.{os.getpid()}-*.build"):
            shutil.rmtree(folder, ignore_errors=True)  # if it was stopped while it cleaned up
        signal.signal(stopped.number, signal.SIG_DFL)
        os.kill(os.getpid(), stopped.number)
    return 0


def _stop(number: int, frame: object) -> None:
    for other in _SIGNALS:  # Ctrl-C sends one, and then the parent another
        signal.signal(other, signal.SIG_IGN)
    raise Stopped(number)


def _build_in_cache(job: dict[str, Any], target: Path, waited: bool) -> None:
    if identity(target) not in (None, job["stale"]):
        return  # another process has built it
    failure = remembered_failure(target)
    if failure is not None and (waited or not job["retry"]):
        # The process that this one waited for has failed, and so would this one: eight ranks of a
        # training job need not all try.
        raise BuildError(failure)
    record = failure_record(target)
    record.unlink(missing_ok=True)
    # What a killed process left: nobody else is at work, as this process holds the lock.
    for folder in target.parent.glob(f"{target.name}.*.build"):
        shutil.rmtree(folder, ignore_errors=True)
    if not (waited and job["tells"]):
        _say(COMPILING)
    try:
        _build(job, target, mode=0o700)
    except (BuildError, OSError) as error:
        with contextlib.suppress(OSError):
            record.write_text(printable(str(error)), encoding="utf-8")
        raise


def _build(job: dict[str, Any], target: Path, mode: int) -> None:
    _remove_old_folders(target.parent, job["limit"])
    with tempfile.TemporaryDirectory(
        prefix=f"{target.name}.{os.getpid()}-",
        suffix=".build",
        dir=target.parent,
        ignore_cleanup_errors=True,
    ) as folder:
        # All sources as one: nearly all of the time goes into PyTorch's headers, which would
        # otherwise be read once for each source.
        whole = Path(folder, "call_path.cpp")
        whole.write_text("".join(f'#include "{file}"\n' for file in job["sources"]), "utf-8")
        linked = Path(folder, target.name)
        command = [*job["compiler"], *job["flags"], str(whole), *job["link"], "-o", str(linked)]
        _compile(command, folder, job["limit"])
        linked.chmod(mode)
        with linked.open("rb") as file:
            contents = digest(file.fileno())
            # Otherwise, a power failure could leave the name on a file without contents.
            os.fsync(file.fileno())
        digest_of_linked = digest_file(linked)
        digest_of_linked.write_text(f"{contents}\n", encoding="ascii")
        digest_of_linked.chmod(mode & 0o666)
        if job["trial"]:
            _try(job["trial"], folder)
        # The digest first. A program that reads in between finds that they do not fit, and then
        # that the file was replaced.
        os.replace(digest_of_linked, digest_file(target))
        os.replace(linked, target)


def _remove_old_folders(parent: Path, limit: float) -> None:
    """Removes what killed processes left, and no living one can be using any more."""
    for folder in parent.glob("_call_path-*.build"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > 2 * limit + 3600:
                shutil.rmtree(folder, ignore_errors=True)


def _compile(command: Sequence[str], folder: str, limit: float) -> None:
    try:
        code, said = _run(command, folder, limit)
    except OSError as error:
        raise BuildError(f"the compiler {command[0]} cannot be run: {error.strerror}") from None
    if code == 0:
        return
    problem = f"failed with exit code {code}"
    if code is None:
        problem = (
            f"did not finish within {limit:g} seconds, and was stopped; TORCHOP_BUILD_TIMEOUT is "
            "the limit"
        )
    raise BuildError(f"the compiler {command[0]} {problem}:\n{said or '(it said nothing)'}")


def _try(command: Sequence[str], folder: str) -> None:
    """Loads the extension in a process of its own, so that no program of the user crashes.

    It does so if the compiler, or what that links, does not go with the one that made PyTorch. All
    other problems are told where the extension is loaded.
    """
    code, said = _run(command, folder, _LONGEST_TRIAL, {"TORCHOP_NATIVE_DIR": folder})
    if code is not None and -code in _CRASHES:
        raise BuildError(
            f"Python crashes when it loads the result (signal {-code}), so this compiler does not "
            f"go with this PyTorch; the environment variable CXX can name another one:\n{said}"
        )


def _run(
    command: Sequence[str], folder: str, limit: float, environment: Mapping[str, str] = {}
) -> tuple[int | None, str]:
    """Runs a program; returns its exit code, None if it took too long, and its last lines.

    It works in the folder of the build, because an empty entry in PATH, CPATH or LIBRARY_PATH means
    the working directory, where anybody's files may be; and it keeps its temporary files there.
    """
    said = bytearray()
    process = None
    try:
        with _without_signals():  # one that came before the number is known would lose it
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, "TMPDIR": folder, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that it can be stopped with all that it started
                preexec_fn=_unblock_signals,
            )
        assert process.stdout is not None
        reader = threading.Thread(target=_read_end, args=(process.stdout, said), daemon=True)
        reader.start()
        code = process.wait(limit)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        with _without_signals():
            if process is not None and process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    # With a limit: a process that the compiler left behind, such as a server, may hold the pipe.
    reader.join(1)
    # The last lines: the first ones mostly say what includes what.
    lines = bytes(said).decode("utf-8", "replace").strip().splitlines()[-_LINES_OF_A_MESSAGE:]
    return code, printable("\n".join(lines), _BYTES_OF_A_COMPILER)


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Keeps the signals that ask this process to end until the block has ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        yield
    finally:
        _unblock_signals()


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)


def _read_end(output: IO[bytes], end: bytearray) -> None:
    """Reads all, and keeps the end."""
    while block := os.read(output.fileno(), 1 << 16):
        end += block
        del end[:-_BYTES_OF_A_MESSAGE]


@contextlib.contextmanager
def _locked(job: dict[str, Any], target: Path) -> Iterator[bool]:
    """Holds the lock of a target; yields whether another process had it first.

    The operating system releases it when the process that holds it dies. The file stays: if it were
    removed, two processes could lock two files of the same name.
    """
    deadline = time.monotonic() + job["limit"]
    waited = False
    with open(target.with_name(f"{target.name}.lock"), "w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if job["tells"] and not waited:
                    _say(COMPILING)
                waited = True
            except OSError:
                # Some network drives have no locks. To compile twice is a waste, but does no harm:
                # the result is put in its place in one step.
                break
            if os.getppid() != job["parent"]:
                raise BuildError("the program that asked for it has ended")  # nobody reads this
            if time.monotonic() > deadline:
                raise BuildError(
                    f"another process was still compiling it after {job['limit']:g} seconds"
                )
            time.sleep(0.1)
        yield waited


def _say(message: bytes) -> None:
    # Not `print`: the parent may be gone, and Python would complain at its exit.
    with contextlib.suppress(OSError):
        os.write(1, message)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
