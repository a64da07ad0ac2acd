"""Run test programs in processes that are forked from a server with PyTorch already imported.

Importing PyTorch, and especially its compilers, takes longer than most of these programs run. So a
server imports them once for the whole test run, and all pytest processes share it. A forked program
still has its own `__main__`, arguments, folder, environment and PYTHONPATH, and exits as Python
normally does. But PyTorch reads some settings, such as OMP_NUM_THREADS, when it is imported, so the
program gets the server's values. Tests that depend on these settings, or on the import itself,
start a new process with `tests._support.common.run_program`.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The server forks a handler for each pytest process, and the handler forks a child for each
# program. The child leaves both loops and runs the program at module level, so the interpreter
# shuts down normally afterwards. The server exits when its standard input is closed.
_SERVER = """
import gc, importlib, json, os, select, signal, socket, sys

# Ignore Ctrl-C here, because it must stop only the tests and the programs. The server exits when
# the tests exit.
interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
os.write(1, b"listening\\n")
for module in sys.argv[2:]:
    importlib.import_module(module)
if "torch._dynamo.guards" in sys.modules:
    sys.modules["torch._dynamo.guards"].profile_guard_manager = lambda *arguments: 0.0
gc.collect()
gc.freeze()  # otherwise each child's garbage collection would copy the memory of these objects
while True:
    if 0 in select.select([0, listener], [], [])[0]:
        os.unlink(sys.argv[1])
        sys.exit()
    connection, _ = listener.accept()
    if os.fork() == 0:
        break
    connection.close()
listener.close()
connection.sendall(b"0\\n")
jobs = connection.makefile()
for line in iter(jobs.readline, ""):
    job = json.loads(line)
    child = os.fork()
    if child == 0:
        break
    connection.sendall(b"%d\\n" % child)
    connection.sendall(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
else:
    sys.exit()

jobs.close()
connection.close()
signal.signal(signal.SIGINT, interrupted)
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
    # Omit the frame of the `exec` call below from tracebacks.
    sys.__excepthook__(kind, error.with_traceback(traceback.tb_next), traceback.tb_next)

sys.excepthook = show
exec(compile(job["source"], job["file"] or "<string>", "exec"), vars(main))
"""


class _Server:
    """A connection to a process that imported `modules` and forks a child per program."""

    def __init__(self, name: str, options: tuple[str, ...], modules: tuple[str, ...]) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex(8)
        place = f"{_folder()}/torchop-{run[:16]}-{name}"
        with _locked():
            if not self._reach(place):
                _start(place, options, modules)
                assert self._reach(place)

    def _reach(self, place: str) -> bool:
        """Connect to the server; return False if none is running."""
        self._connection = socket.socket(socket.AF_UNIX)
        self._answers = self._connection.makefile()
        try:
            self._connection.connect(place)
            is_there = self._answers.readline() == "0\n"
        except OSError:
            is_there = False
        if not is_there:
            self._answers.close()
            self._connection.close()
            return False
        atexit.register(self._answers.close)
        atexit.register(self._connection.close)
        return True

    def run(
        self, timeout: float, *, stdout: str | None = None, **job: Any
    ) -> subprocess.CompletedProcess[str]:
        with _file() as out, _file() as err:
            job["files"] = [os.devnull, stdout or out, err]
            self._connection.sendall(f"{json.dumps(job)}\n".encode())
            is_late = threading.Event()
            child = self._number()

            def stop() -> None:
                is_late.set()
                os.kill(child, signal.SIGKILL)

            timer = threading.Timer(timeout, stop)
            timer.start()
            try:
                code = self._number()
            except KeyboardInterrupt:  # otherwise the program would continue to run
                stop()
                self._number()  # otherwise the next program would read this exit code
                raise
            finally:
                timer.cancel()
            written = Path(out).read_text(), Path(err).read_text()
        if is_late.is_set():
            raise subprocess.TimeoutExpired(job["source"], timeout, *written)
        return subprocess.CompletedProcess(job["arguments"], code, *written)

    def _number(self) -> int:
        return int(self._answers.readline())


def _folder() -> str:
    """Return a folder with a short path, because some systems limit socket paths to 103 bytes."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < 60 else "/tmp"


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Hold a lock while a process starts a server, stops one or connects to one."""
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(place: str, options: tuple[str, ...], modules: tuple[str, ...]) -> None:
    Path(place).unlink(missing_ok=True)  # the socket of a server that was killed remains
    process = subprocess.Popen(
        [sys.executable, *options, "-c", _SERVER, place, *modules],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    with process.stdout as output:
        assert output.readline() == b"listening\n"

    def end() -> None:
        with _locked(), process:
            pass  # `with process` closes the server's standard input and waits for its exit

    atexit.register(end)


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
    """If Dynamo is imported, keep it from measuring how long the guards of each graph take.

    Before each measurement, Dynamo flushes the processor's caches, which takes longer than
    compiling a small graph. No test uses the measurements.
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
    """Run a program that needs PyTorch but no compiler, with warnings as errors."""
    return _run_source(_torch(), source, arguments, folder, timeout, environment)


def run_module(
    name: str,
    *arguments: str,
    folder: Path | None = None,
    stdout: str | None = None,
    timeout: float = 120,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a module in a folder, like `python -m`, and write its output to the file `stdout`."""
    return _compilers().run(  # most commands import the compilers
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
    return _server("torch", ("-W", "error::UserWarning"), ("torch",))


def _compilers() -> _Server:
    modules = ["torch", "torch._dynamo", "torch._inductor.compile_fx"]
    if os.environ.get("TORCHOP_TEST_DEVICE", "").startswith("cuda"):
        # These modules initialize CUDA when they are imported, but a forked process cannot use CUDA
        # if its parent has initialized CUDA.
        del modules[1:]
    return _server("compilers", (), tuple(modules))
