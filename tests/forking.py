"""Programs in processes of their own, forked from one that has imported PyTorch.

Importing PyTorch takes longer than most of these programs, and its compilers longer still. What is
not of torchop is imported once for all programs of a test process. A program is otherwise as if it
had been started: it has its own `__main__`, arguments, folder, environment and PYTHONPATH, and ends
as Python does. Only what is read when PyTorch is imported, such as OMP_NUM_THREADS, is that of the
server. So tests of that, and of what is imported, start a process (`support.run_program`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The forked process leaves the loop, and runs its program where Python would have run it: what is
# left to do when the interpreter ends is done by the interpreter.
_SERVER = """
import gc, importlib, json, os, sys

for module in sys.argv[1:]:
    importlib.import_module(module)
if "torch._dynamo.guards" in sys.modules:
    sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *arguments: 0.0
gc.collect()
gc.freeze()  # or each program would copy the memory of all these objects when it looks for garbage
for line in iter(sys.stdin.readline, ""):
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    os.write(1, b"%d\\n" % child)
    os.write(1, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    sys.exit()

for number, (name, flags) in enumerate(zip(job["files"], (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY))):
    file = os.open(name, flags)
    os.dup2(file, number)
    os.close(file)
os.chdir(job["folder"])
os.environ.clear()
os.environ.update(job["environment"])
sys.argv[:] = job["arguments"]
sys.path[0] = job["path"]
paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
sys.path[1:1] = [path for path in paths if path not in ("", *sys.path)]
main = sys.modules["__main__"] = type(sys)("__main__")
main.__builtins__ = __builtins__
if job["file"] is not None:
    main.__file__ = job["file"]

def show(kind, error, traceback):
    # Without the line below.
    sys.__excepthook__(kind, error.with_traceback(traceback.tb_next), traceback.tb_next)

sys.excepthook = show
exec(compile(job["source"], job["file"] or "<string>", "exec"), vars(main))
"""


class _Server:
    """A process that has imported some modules, and forks a process for each program."""

    def __init__(self, options: tuple[str, ...], modules: tuple[str, ...]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *options, "-c", _SERVER, *modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        atexit.register(self._end)

    def run(
        self, timeout: float, *, stdout: str | None = None, **job: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program, and returns what it wrote and how it ended."""
        with _file() as out, _file() as err:
            job["files"] = [os.devnull, stdout or out, err]
            assert self._process.stdin is not None
            self._process.stdin.write(f"{json.dumps(job)}\n")
            is_late = threading.Event()
            child = self._number()

            def stop() -> None:
                is_late.set()
                os.kill(child, signal.SIGKILL)

            timer = threading.Timer(timeout, stop)
            timer.start()
            code = self._number()
            timer.cancel()
            written = Path(out).read_text(), Path(err).read_text()
        if is_late.is_set():
            raise subprocess.TimeoutExpired(job["source"], timeout, *written)
        return subprocess.CompletedProcess(job["arguments"], code, *written)

    def _number(self) -> int:
        assert self._process.stdout is not None
        return int(self._process.stdout.readline())

    def _end(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def _file() -> Iterator[str]:
    handle, name = tempfile.mkstemp()
    os.close(handle)
    try:
        yield name
    finally:
        os.unlink(name)


_server = functools.cache(_Server)


def leave_guards_untimed() -> None:
    """Keeps Dynamo, once it is imported, from timing the guards of each graph that it compiles.

    It flushes the caches of the processor before, which takes longer than to compile a small graph.
    The time goes into a log that nobody reads.
    """
    guards = sys.modules.get("torch._dynamo.guards")
    if guards is not None:
        guards.profile_guard_manager = lambda *arguments: 0.0  # type: ignore[attr-defined]


def run_forked(
    source: str,
    *arguments: str,
    folder: Path | None = None,
    timeout: float = 120,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a program that needs PyTorch; warnings are errors there too."""
    return _run_source(_torch(), source, arguments, folder, timeout, environment)


def run_module(
    name: str,
    *arguments: str,
    folder: Path | None = None,
    stdout: str | None = None,
    timeout: float = 120,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a module, as `python -m` does, in a folder; `stdout` is a file to write to."""
    return _compilers().run(  # which most commands import
        timeout,
        stdout=stdout,
        source=f"import runpy\nrunpy.run_module({name!r}, run_name='__main__', alter_sys=True)",
        file=None,
        arguments=["-m", *arguments],
        path=str(folder or Path.cwd()),
        folder=str(folder or Path.cwd()),
        environment={**os.environ, **environment},
    )


def run_compiling(
    source: str,
    *arguments: str,
    folder: Path | None = None,
    timeout: float = 300,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Runs a program that needs PyTorch's compilers."""
    return _run_source(_compilers(), source, arguments, folder, timeout, environment)


def _run_source(
    server: _Server,
    source: str,
    arguments: tuple[str, ...],
    folder: Path | None,
    timeout: float,
    environment: dict[str, str],
) -> subprocess.CompletedProcess[str]:
    return server.run(
        timeout,
        source=textwrap.dedent(source),
        file=None,
        arguments=["-c", *arguments],
        path="",
        folder=str(folder or Path.cwd()),
        environment={**os.environ, **environment},
    )


def run_script(
    script: Path, *arguments: str, timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Runs a file with a program that needs PyTorch's compilers."""
    return _compilers().run(
        timeout,
        source=script.read_text(encoding="utf-8"),
        file=str(script),
        arguments=[str(script), *arguments],
        path=str(script.parent),
        folder=os.getcwd(),
        environment=dict(os.environ),
    )


def _torch() -> _Server:
    return _server(("-W", "error::UserWarning"), ("torch",))


def _compilers() -> _Server:
    return _server((), ("torch", "torch._dynamo", "torch._inductor.compile_fx"))
