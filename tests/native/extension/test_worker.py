"""The process that compiles: what it leaves behind, and what it says."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forking import run_forked
from tests.support import assert_clean
from torchop._errors import NativeUnavailableError
from torchop._native.extension import child, files, worker
from torchop._native.extension.recipe import make_recipe

Compiler = Callable[[str], Path]


@pytest.fixture
def start(cache_folder: Path, source: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """Starts to build in the cache."""

    def start(**options: object) -> subprocess.Popen[bytes]:
        return child.start(make_recipe(source), files.make_cache_folder(), **options)  # type: ignore[arg-type]

    return start


Start = Callable[..., "subprocess.Popen[bytes]"]


def runs(log: Path) -> int:
    return len(log.read_text().splitlines())


def names(folder: Path) -> set[str]:
    return {file.suffix for file in folder.iterdir()}


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = "import sys, runpy; runpy.run_path(sys.argv[1]); print('torch' in sys.modules)"
    command = [sys.executable, "-I", "-S", "-c", code, worker.__file__]
    assert subprocess.check_output(command, text=True) == "False\n"


def test_only_the_file_and_its_lock_remain(
    start: Start, copying_compiler: Path, target: Path, built: Path
) -> None:
    os.umask(umask := os.umask(0))
    child.wait(start())
    assert names(target.parent) == {".so", ".lock", ".digest"}
    assert target.read_bytes() == built.read_bytes()
    assert worker.expected_digest(target) == hashlib.sha256(built.read_bytes()).hexdigest()
    assert stat.S_IMODE(target.stat().st_mode) == 0o700
    assert stat.S_IMODE(worker.digest_file(target).stat().st_mode) == 0o600
    assert os.umask(umask) == umask


def test_file_that_is_there_is_kept_unless_it_is_the_stale_one(
    start: Start, copying_compiler: Path, in_cache: Path
) -> None:
    child.wait(start())
    child.wait(start(stale=[1, 2]))
    assert runs(copying_compiler) == 0
    before = worker.identity(in_cache)
    child.wait(start(stale=before))
    assert runs(copying_compiler) == 1
    assert worker.identity(in_cache) != before


def test_many_at_once_compile_once(start: Start, copying_compiler: Path) -> None:
    for process in [start() for _ in range(6)]:
        child.wait(process)
    assert runs(copying_compiler) == 1


def test_those_that_wait_fail_with_the_one_that_compiles(start: Start, compiler: Compiler) -> None:
    log = compiler("sleep 1; echo 'no space left' >&2; exit 3")
    for process in [start() for _ in range(4)]:
        with pytest.raises(NativeUnavailableError, match=r"exit code 3:\nno space left"):
            child.wait(process)
    assert runs(log) == 1
    with pytest.raises(NativeUnavailableError, match=r"exit code 3:\nno space left"):
        child.wait(start())
    assert runs(log) == 1
    with pytest.raises(NativeUnavailableError, match=r"exit code 3:\nno space left"):
        child.wait(start(retry=True))
    assert runs(log) == 2


def test_holder_of_the_lock_that_dies_lets_go_of_it(
    start: Start, compiler: Compiler, built: Path, cache_folder: Path
) -> None:
    log = compiler("exec sleep 30")
    first = start()
    assert first.stdout is not None
    assert first.stdout.readline() == worker.COMPILING
    first.stdout.close()
    while runs(log) == 0:
        time.sleep(0.01)
    compiler(f'cp {built} "$target"')
    second = start()
    first.kill()
    child.wait(second)
    first.wait()
    assert names(cache_folder) == {".so", ".lock", ".digest"}  # and what the first one left is gone


# --------------------------------------------------------------------------------------------------
# Limits of time, and being stopped

# A compiler that hangs, and so does what it started.
HANGING = "sleep 300 & echo $! > {pid}; echo working; sleep 300"


@pytest.fixture
def hanging(compiler: Compiler, tmp_path: Path) -> Callable[[], int]:
    """A compiler that hangs; returns how to wait for the process that it starts, and its number."""
    pid = tmp_path / "pid"
    compiler(HANGING.format(pid=pid))

    def started() -> int:
        deadline = time.monotonic() + 30
        while not pid.exists() or not pid.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return int(pid.read_text())

    return started


def assert_ended(pid: int) -> None:
    """Checks that a process is gone, or has ended and was not yet asked for."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} goes on")


@contextlib.contextmanager
def heeded(number: int) -> Iterator[None]:
    """A block in which a child is started that heeds a signal.

    It would inherit that the signal is ignored, as SIGHUP is under nohup, and SIGINT in a shell's
    background.
    """
    handler = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, handler)


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
def test_compiler_that_hangs_is_stopped_with_what_it_started(
    start: Start, hanging: Callable[[], int], target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_BUILD_TIMEOUT", "1")
    process = start()
    message = r"did not finish within 1 seconds.*TORCHOP_BUILD_TIMEOUT.*:\nworking$"
    with pytest.raises(NativeUnavailableError, match=message):
        child.wait(process)
    assert_ended(hanging())
    assert names(target.parent) == {".lock", ".failure"}
    assert "did not finish" in str(worker.remembered_failure(target))


@needs_proc
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopping_it_stops_the_compiler_and_leaves_nothing(
    start: Start, hanging: Callable[[], int], cache_folder: Path, number: int
) -> None:
    with heeded(number):
        process = start()
    assert process.stdout is not None
    with process.stdout:
        pid = hanging()
        process.send_signal(number)
        process.send_signal(signal.SIGTERM)  # as after Ctrl-C, when the parent follows
        assert process.wait(10) == -number
    assert_ended(pid)
    assert names(cache_folder) == {".lock"}


@needs_proc
def test_interrupt_of_the_command_line_leaves_nothing(
    hanging: Callable[[], int], cache_folder: Path, tmp_path: Path
) -> None:
    for out in ([], ["--out", str(tmp_path / "out")]):
        command = [sys.executable, "-m", "torchop", "build", *out]
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with heeded(signal.SIGINT):
            program = subprocess.Popen(command, start_new_session=True, **pipes)
        pid = hanging()
        os.killpg(program.pid, signal.SIGINT)  # as the terminal does
        assert program.wait(20) != 0
        assert_ended(pid)
        (tmp_path / "pid").unlink()
    assert names(cache_folder) == {".lock"}
    assert names(tmp_path / "out") == set()


def test_wait_for_another_process_has_a_limit(
    start: Start, copying_compiler: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_BUILD_TIMEOUT", "0.5")
    files.make_cache_folder()
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NativeUnavailableError, match=r"still compiling it after 0\.5 seconds"):
            child.wait(start())
    assert worker.remembered_failure(target) is None
    assert runs(copying_compiler) == 0


PROGRAM = """
import sys
from pathlib import Path
from torchop._native.extension import child, files
from torchop._native.extension.recipe import make_recipe
process = child.start(make_recipe(Path(sys.argv[1])), files.make_cache_folder(), background=True)
print(process.pid)
"""


@needs_proc
def test_wait_for_another_process_ends_with_the_parent(
    source: Path, copying_compiler: Path, target: Path
) -> None:
    files.make_cache_folder()
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_ended(int(assert_clean(run_forked(PROGRAM, str(source)))))
    assert runs(copying_compiler) == 0


def test_server_that_the_compiler_starts_is_not_waited_for(
    start: Start, compiler: Compiler, built: Path, target: Path
) -> None:
    compiler(f'sleep 20 & cp {built} "$target"')
    started = time.monotonic()
    child.wait(start())
    assert time.monotonic() - started < 15
    assert target.exists()


def test_folders_of_killed_processes_go_when_they_are_old(
    start: Start, copying_compiler: Path, cache_folder: Path
) -> None:
    files.make_cache_folder()
    old, new = (cache_folder / f"_call_path-other-key.so.{name}.build" for name in ("1-a", "2-b"))
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (0, 0))
    child.wait(start())
    assert not old.exists()
    assert new.exists()  # another process may be at work in it


# --------------------------------------------------------------------------------------------------
# What it says


def test_last_lines_of_the_compiler_are_the_message(start: Start, compiler: Compiler) -> None:
    compiler("for i in $(seq 99); do echo line $i >&2; done; exit 1")
    with pytest.raises(NativeUnavailableError) as caught:
        child.wait(start())
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("fake-c++ failed with exit code 1:")
    assert lines == [f"line {number}" for number in range(80, 100)]


def test_message_is_cut_and_cannot_control_a_terminal(start: Start, compiler: Compiler) -> None:
    compiler(
        "head -c 1000000 /dev/zero | tr '\\0' x >&2\n"
        "printf '\\033]0;title\\007 \\033[2J \\302\\233m \\342\\200\\256 \\377 end' >&2; exit 1"
    )
    with pytest.raises(NativeUnavailableError) as caught:
        child.wait(start())
    message = str(caught.value)
    assert re.match(r"the compiler \S+ failed with exit code 1:\nxxx", message)
    assert message.endswith("\\x1b]0;title\\x07 \\x1b[2J \\x9bm \\u202e \ufffd end")
    assert message.replace("\n", "").isprintable()
    assert len(message.encode()) <= 8192
    assert worker.remembered_failure(files.cache_folder() / "none") is None


def test_record_of_a_failure_is_cut_and_cannot_control_a_terminal(tmp_path: Path) -> None:
    worker.failure_record(tmp_path / "file").write_text("\x1b[2J" + "x" * 100_000)
    failure = worker.remembered_failure(tmp_path / "file")
    assert failure is not None
    assert failure.isprintable()
    assert len(failure) <= 8192


def test_compiler_works_in_the_folder_of_the_build(
    start: Start, compiler: Compiler, built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There, an empty entry in PATH or CPATH leads to nobody else's files."""
    monkeypatch.chdir(tmp_path)
    compiler(
        f'test "$PWD" = "$TMPDIR" && test "$PWD" = "$(dirname $target)" && cp {built} "$target"'
    )
    child.wait(start())


def test_failure_is_on_record_until_the_next_build(
    start: Start, compiler: Compiler, built: Path, target: Path
) -> None:
    record = worker.failure_record(target)
    compiler("echo broken; exit 1")
    with pytest.raises(NativeUnavailableError):
        child.wait(start())
    assert "failed with exit code 1:\nbroken" in record.read_text()
    compiler(f'cp {built} "$target"')
    child.wait(start(retry=True))
    assert not record.exists()


def test_compiler_that_cannot_be_run(start: Start, compiler: Compiler) -> None:
    compiler("")
    Path(os.environ["CXX"]).write_text("#!/nowhere/sh\n")
    with pytest.raises(NativeUnavailableError, match="cannot be run: No such file or directory"):
        child.wait(start())


def test_folder_that_goes_away(start: Start, compiler: Compiler, cache_folder: Path) -> None:
    compiler(f'rm -r {cache_folder}; touch "$target"')
    with pytest.raises(NativeUnavailableError, match="No such file or directory"):
        child.wait(start())


def test_it_finishes_without_its_parent(start: Start, copying_compiler: Path, target: Path) -> None:
    process = start(background=True)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(30) == 0
    assert target.exists()
