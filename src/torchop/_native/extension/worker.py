"""The program that compiles: run by path, in a process of its own, with a job in JSON.

It imports nothing but the standard library, because importing torchop would import PyTorch, which
takes longer than some compilations. If its parent ends first, it finishes anyway, for the next
program.

It writes one line when it starts to compile, from which its parent knows that it does more than
wait for another process; then, if it fails, why.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows, where nothing is compiled
    fcntl = None  # type: ignore[assignment]

COMPILING = b"compiling\n"
_LINES_OF_A_MESSAGE = 20


class BuildError(Exception):
    """The compiler failed, or could not be started."""


def failure_record(target: Path) -> Path:
    """The file that says why the last build of `target`, or loading what it built, failed."""
    return target.with_name(f"{target.name}.failure")


def identity(file: Path) -> list[int] | None:
    """What tells a file from one that replaces it; None if there is no file."""
    try:
        status = file.stat()
    except OSError:
        return None
    return [status.st_ino, status.st_mtime_ns]


def tail(text: str) -> str:
    """The last lines of what a compiler says; the first ones mostly say what includes what."""
    return "\n".join(text.strip().splitlines()[-_LINES_OF_A_MESSAGE:])


def main(job: dict[str, Any]) -> int:
    """Does a job.

    Args:
        job: `compiler`, `flags` and `link` are parts of the command, in this order; `sources` are
            files; `target` is the file to make. One that is there already is kept, except the
            `stale` one. In a `cache`, processes wait for one another, and nobody else may read.
            `niceness` is by how much other programs go first.
    """
    target = Path(job["target"])
    try:
        os.nice(job["niceness"])
        if not job["cache"]:
            _build(job, target, mode=0o755)
            return 0
        os.umask(0o077)
        with _locked(target) as waited:
            _build_in_cache(job, target, waited)
    except (BuildError, OSError) as error:
        _say(str(error).encode())
        return 1
    return 0


def _build_in_cache(job: dict[str, Any], target: Path, waited: bool) -> None:
    if identity(target) not in (None, job["stale"]):
        return  # another process has built it
    record = failure_record(target)
    if waited and record.exists():
        # The process that this one waited for has failed, and so would this one: eight ranks of a
        # training job need not all try.
        raise BuildError(record.read_text(encoding="utf-8"))
    record.unlink(missing_ok=True)
    # What a killed process left: nobody else is at work, as this process holds the lock.
    for folder in target.parent.glob(f"{target.name}.*.build"):
        shutil.rmtree(folder, ignore_errors=True)
    try:
        _build(job, target, mode=0o700)
    except (BuildError, OSError) as error:
        with contextlib.suppress(OSError):
            record.write_text(str(error), encoding="utf-8")
        raise


def _build(job: dict[str, Any], target: Path, mode: int) -> None:
    _say(COMPILING)
    with tempfile.TemporaryDirectory(
        prefix=f"{target.name}.", suffix=".build", dir=target.parent, ignore_cleanup_errors=True
    ) as folder:
        # All sources as one: nearly all of the time goes into PyTorch's headers, which would
        # otherwise be read once for each source.
        whole = Path(folder, "call_path.cpp")
        whole.write_text("".join(f'#include "{file}"\n' for file in job["sources"]), "utf-8")
        linked = Path(folder, target.name)
        _run([*job["compiler"], *job["flags"], str(whole), *job["link"], "-o", str(linked)])
        linked.chmod(mode)
        # Otherwise, a power failure could leave the name on a file without contents.
        with linked.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(linked, target)


def _run(command: Sequence[str]) -> None:
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise BuildError(f"the compiler {command[0]} cannot be run: {error.strerror}") from None
    if process.returncode != 0:
        raise BuildError(
            f"the compiler {command[0]} failed with exit code {process.returncode}:\n"
            f"{tail(process.stdout) or '(it said nothing)'}"
        )


@contextlib.contextmanager
def _locked(target: Path) -> Iterator[bool]:
    """Holds the lock of a target; yields whether another process had it first.

    The operating system releases it when the process that holds it dies. The file stays: if it were
    removed, two processes could lock two files of the same name.
    """
    with open(target.with_name(f"{target.name}.lock"), "w") as file:
        waited = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = True
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            # Some network drives have no locks. To compile twice is a waste, but does no harm: the
            # result is put in its place in one step.
            pass
        yield waited


def _say(message: bytes) -> None:
    # Not `print`: the parent may be gone, and Python would complain at its exit.
    with contextlib.suppress(OSError):
        os.write(1, message)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
