"""The process that compiles, as its parent sees it: started, and waited for."""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import IO

from torchop._errors import NativeUnavailableError
from torchop._native.extension import compiler, worker
from torchop._native.extension.notice import Notice
from torchop._native.extension.recipe import (
    Recipe,
    compile_flags,
    include_flags,
    library_flags,
    link_flags,
)

_NICENESS = 10  # of a build in the background: the user's program comes first


def start(
    recipe: Recipe,
    folder: Path,
    *,
    stale: list[int] | None = None,
    in_cache: bool = True,
    background: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts to build into a folder.

    Args:
        recipe: what to build.
        folder: where the file goes.
        stale: the `worker.identity` of the file that is there, if it is to be replaced.
        in_cache: whether other processes may be building the same, and wait for one another.
        background: whether the process outlives this one, and Ctrl-C on the terminal.

    Raises:
        NativeUnavailableError: something that it takes is not installed.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        # There, sys.executable is the program itself, which would start itself without end.
        raise NativeUnavailableError(
            "this program has Python built in, so there is no Python to run the compiler from. "
            "Build with an ordinary Python, and name the folder in TORCHOP_NATIVE_DIR"
        )
    job = {
        "compiler": compiler.find(),
        "flags": [*compile_flags(), *include_flags()],
        "link": [*library_flags(), *link_flags()],
        "sources": [str(source) for source in sorted(recipe.source.absolute().glob("*.cpp"))],
        "target": str(folder / recipe.file_name),
        "stale": stale,
        "cache": in_cache,
        "niceness": _NICENESS if background else 0,
    }
    # Without the user's site-packages and settings: they cost time, and cannot be needed.
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
    """Waits for the process, and shows that it compiles if it does.

    Raises:
        NativeUnavailableError: it failed; says why.
    """
    assert process.stdout is not None
    notice = Notice()
    try:
        with process.stdout as output:
            said = output.readline()
            if said == worker.COMPILING:
                notice.start()
                if notice.counts:
                    _count_seconds(output, notice)
                said = b""
            said += output.read()
        process.wait()
    except BaseException:  # Ctrl-C, in the foreground
        process.terminate()
        process.wait()
        notice.finish("stopped")
        raise
    notice.finish("done" if process.returncode == 0 else "failed")
    if process.returncode < 0:
        raise NativeUnavailableError(
            f"the process that compiles was ended by signal {-process.returncode}; signal 9 means "
            "mostly that memory ran out"
        )
    if process.returncode != 0:
        raise NativeUnavailableError(said.decode("utf-8", "replace").strip())


def _count_seconds(output: IO[bytes], notice: Notice) -> None:
    """Counts until the process writes again, or ends."""
    with selectors.DefaultSelector() as selector:
        selector.register(output, selectors.EVENT_READ)
        while not selector.select(timeout=1):
            notice.tick()
