"""The process that compiles: starting it, waiting for it, and what the user sees."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import torchop
from tests.forking import run_forked
from tests.support import assert_clean
from tests.terminals import screen, terminal
from torchop._errors import NativeUnavailableError
from torchop._native.extension import child, files, worker
from torchop._native.extension.recipe import make_recipe

Compiler = Callable[[str], Path]


def test_background_is_out_of_the_reach_of_the_terminal_and_polite(
    target: Path, source: Path, compiler: Compiler
) -> None:
    compiler('touch "$target"; nice >&2; exit 1')
    for background, niceness in ((True, min(os.nice(0) + 10, 19)), (False, os.nice(0))):
        process = child.start(make_recipe(source), files.make_cache_folder(), background=background)
        assert (os.getsid(process.pid) == process.pid) is background
        with pytest.raises(NativeUnavailableError, match=f":\n{niceness}$"):
            child.wait(process)
        worker.failure_record(target).unlink()


def test_process_that_is_killed_says_by_what(
    cache_folder: Path, source: Path, compiler: Compiler
) -> None:
    compiler("kill -9 $PPID")
    with pytest.raises(NativeUnavailableError, match="ended by signal 9; signal 9 usually means"):
        child.wait(child.start(make_recipe(source), files.make_cache_folder()))


def test_process_that_crashes_says_how(
    cache_folder: Path, source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = cache_folder.parent / "broken.py"
    broken.write_text("raise ValueError('a bug of ours')")
    compiler("")
    monkeypatch.setattr(worker, "__file__", str(broken))
    with pytest.raises(NativeUnavailableError, match="ValueError: a bug of ours"):
        child.wait(child.start(make_recipe(source), files.make_cache_folder()))


def test_an_extension_that_crashes_python_is_not_kept(
    cache_folder: Path, compiler: Compiler
) -> None:
    crash = "void* PyInit__call_path(void) { __builtin_trap(); }"
    compiler(f"echo '{crash}' | gcc -x c -shared -fPIC -o \"$target\" -")
    with pytest.raises(NativeUnavailableError) as caught:
        child.wait(child.start(make_recipe(), files.make_cache_folder()))
    message = str(caught.value)
    assert message.startswith("Python crashes when it loads the result (signal 4), so this compil")
    assert 'File "' in message.partition("environment variable CXX can name another one:\n")[2]
    assert {file.suffix for file in cache_folder.iterdir()} == {".failure", ".lock"}


@pytest.mark.parametrize("is_there", [True, False])
def test_the_trial_loads_the_extension(is_there: bool, tmp_path: Path) -> None:
    path = torchop.native.status().path
    assert path is not None
    environment = {
        **os.environ,
        "TORCHOP_CACHE_DIR": str(tmp_path),
        "TORCHOP_NATIVE_DIR": str(path.parent if is_there else tmp_path),
    }
    code = subprocess.run(child._trial(), env=environment, capture_output=True).returncode
    assert code == (0 if is_there else 1)


def test_an_extension_that_fails_otherwise_is_kept_and_told_when_it_is_loaded(
    cache_folder: Path, compiler: Compiler
) -> None:
    compiler("echo 'int nothing;' | gcc -x c -shared -fPIC -o \"$target\" -")
    child.wait(child.start(make_recipe(), files.make_cache_folder()))
    (file,) = cache_folder.glob("*.so")
    with pytest.raises(files.UnusableFileError, match="does not define module export function"):
        files.load(file, cached=True)


def test_interrupt_ends_the_process(cache_folder: Path, source: Path, compiler: Compiler) -> None:
    compiler("exec sleep 30")
    process = child.start(make_recipe(source), files.make_cache_folder())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            child.wait(process)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert process.returncode == -signal.SIGTERM


def test_process_that_hangs_is_stopped(
    cache_folder: Path, source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own limits stop it earlier, unless a drive of the network does not answer."""
    hanging = cache_folder.parent / "hanging.py"
    hanging.write_text("import time; time.sleep(100)")
    compiler("")
    monkeypatch.setattr(worker, "__file__", str(hanging))
    monkeypatch.setattr(child, "_GRACE", 0.1)
    monkeypatch.setenv("TORCHOP_BUILD_TIMEOUT", "0.1")
    process = child.start(make_recipe(source), files.make_cache_folder())
    with pytest.raises(NativeUnavailableError, match="did not end in time, and was stopped"):
        child.wait(process)
    assert process.returncode == -signal.SIGTERM


def test_limit_is_a_number_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHOP_BUILD_TIMEOUT", raising=False)
    assert child.limit() == 600
    monkeypatch.setenv("TORCHOP_BUILD_TIMEOUT", "1.5")
    assert child.limit() == 1.5
    for value in ("0", "-1", "inf", "nan", "a minute"):
        monkeypatch.setenv("TORCHOP_BUILD_TIMEOUT", value)
        with pytest.raises(NativeUnavailableError, match=f"TORCHOP_BUILD_TIMEOUT is '{value}'"):
            child.limit()


def test_program_with_python_built_in_is_not_started_again(
    cache_folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(NativeUnavailableError, match=r"Python is embedded.*TORCHOP_NATIVE_DIR"):
        child.start(make_recipe(source), files.make_cache_folder())


def test_process_that_cannot_be_started(
    cache_folder: Path, source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    compiler("")
    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(NativeUnavailableError, match=r"cannot be started: .*allocate memory"):
        child.start(make_recipe(source), files.make_cache_folder())


# --------------------------------------------------------------------------------------------------
# The line on stderr


@pytest.mark.parametrize("notice", [child.NOTICE, child.NOTICE_IN_BACKGROUND])
def test_user_gets_one_line(notice: str, capsys: pytest.CaptureFixture[str]) -> None:
    for said in ("compiling its native call path, once", "about 20 s", "TORCHOP_NATIVE=0 turns"):
        assert said in notice
    child.tell_user(notice)
    assert capsys.readouterr().err == f"{notice}\n"


def test_user_in_the_background_is_told_that_calls_are_slow() -> None:
    for said in ("Calls take longer until it", "call torchop.native.wait() before you time them"):
        assert said in child.NOTICE_IN_BACKGROUND


@pytest.mark.parametrize("stderr", [None, object(), io.StringIO()], ids=["none", "broken", "text"])
def test_what_stands_for_stderr(stderr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    child.tell_user("line")
    if isinstance(stderr, io.StringIO):
        assert stderr.getvalue() == "line\n"


COLUMNS = 20


@pytest.mark.parametrize("columns", [COLUMNS, 0])
@pytest.mark.parametrize(
    ("before", "stays"),
    [
        ("", []),
        ("whole\n", ["whole"]),
        ("step 1: ", ["step 1:"]),
        ("x" * (COLUMNS - 1), ["x" * (COLUMNS - 1)]),
        ("x" * COLUMNS, ["x" * COLUMNS]),
        ("x" * (COLUMNS + 1), ["x" * COLUMNS, "x"]),
        ("\r  0%|    |\r 10%|#   |", [" 10%|#   |"]),
    ],
)
def test_on_a_terminal_the_line_is_not_shared(
    before: str, stays: list[str], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with terminal(columns) as (written, stderr):
        monkeypatch.setattr(sys, "stderr", stderr)
        stderr.write(before)
        stderr.flush()
        child.tell_user("torchop: ready")
        stderr.write("loss 0.5\n")
        stderr.flush()
        shown = screen(written(), COLUMNS)
    # A terminal that does not know its width may get an empty line.
    assert [line for line in shown if line or columns] == [*stays, "torchop: ready", "loss 0.5"]


# --------------------------------------------------------------------------------------------------
# The end of the interpreter

# The end of the interpreter waits for a thread at work, and stops one that comes later.
PROGRAM = """
    import atexit, threading, time
    from torchop._native.extension.child import not_exiting

    at_work = threading.Event()

    def work():
        with not_exiting:
            at_work.set()
            time.sleep(0.3)
            print("finished", flush=True)
        time.sleep(0.1)
        with not_exiting:
            print("too late", flush=True)

    threading.Thread(target=work, daemon=True).start()
    at_work.wait()
    atexit._run_exitfuncs()  # what the end of the interpreter does
    time.sleep(0.5)          # and time for the thread to do what it should not
"""


def test_thread_at_work_finishes_and_does_no_more() -> None:
    assert assert_clean(run_forked(PROGRAM, TORCHOP_NATIVE="0")) == "finished\n"
