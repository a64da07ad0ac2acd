"""Programs in processes of their own, forked from one that has imported PyTorch.

Importing PyTorch takes longer than most of these programs, and its compilers longer still. What is
not of torchop is imported once for all programs of a test run, whose processes share the server
that one of them starts. A program is otherwise as if it had been started: it has its own
`__main__`, arguments, folder, environment and PYTHONPATH, and ends as Python does. Only what is
read when PyTorch is imported, such as OMP_NUM_THREADS, is that of the server. So tests of that, and
of what is imported, start a process (`support.run_program`).
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

# It forks a process for each process of the tests, and that one for each program. The last leaves
# the loops, and runs its program where Python would have run it: what is left to do when the
# interpreter ends is done by the interpreter. The server ends with its standard input.
_SERVER = """
import gc, importlib, json, os, select, signal, socket, sys

# Ctrl-C is for the tests, with which the server ends, and for the programs.
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
gc.freeze()  # or each program would copy the memory of all these objects when it looks for garbage
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
    # Without the line below.
    sys.__excepthook__(kind, error.with_traceback(traceback.tb_next), traceback.tb_next)

sys.excepthook = show
exec(compile(job["source"], job["file"] or "<string>", "exec"), vars(main))
"""


class _Server:
    """A process that has imported some modules, and forks a process for each program."""

    def __init__(self, name: str, options: tuple[str, ...], modules: tuple[str, ...]) -> None:
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID") or secrets.token_hex(8)
        place = f"{_folder()}/torchop-{run[:16]}-{name}"
        with _locked():
            if not self._reach(place):
                _start(place, options, modules)
                assert self._reach(place)

    def _reach(self, place: str) -> bool:
        """Connect with the server; False if there is none yet, or none any more."""
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
        """Run a program, and return what it wrote and how it ended."""
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
            except KeyboardInterrupt:  # after which nobody would stop it
                stop()
                self._number()  # or the next program would get it
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
    """Return the folder of sockets, whose paths have at most 103 bytes on some systems."""
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) < 60 else "/tmp"


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """A block in which no other process starts a server, ends one or connects with it."""
    with open(__file__) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _start(place: str, options: tuple[str, ...], modules: tuple[str, ...]) -> None:
    Path(place).unlink(missing_ok=True)  # of a server that was killed
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
            pass  # which closes its standard input, and waits for its end

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
    """Keep Dynamo, once it is imported, from timing the guards of each graph that it compiles.

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
    """Run a program that needs PyTorch; warnings are errors there too."""
    return _run_source(_torch(), source, arguments, folder, timeout, environment)


def run_module(
    name: str,
    *arguments: str,
    folder: Path | None = None,
    stdout: str | None = None,
    timeout: float = 120,
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    """Run a module, as `python -m` does, in a folder; `stdout` is a file to write to."""
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
    """Run a program that needs PyTorch's compilers."""
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
    """Run a file with a program that needs PyTorch's compilers."""
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
        del modules[1:]  # which look for CUDA when they are imported, and then no fork can use it
    return _server("compilers", (), tuple(modules))
