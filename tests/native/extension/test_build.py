"""Compiling the extension under a lock, and cleaning up after failures. Uses private names."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests._support.common import in_threads
from torchop._native.extension import files
from torchop._native.extension.build import Build
from torchop._native.extension.recipe import make_recipe
from torchop.native import NativeUnavailableError

Compiler = Callable[[str], Path]


@pytest.fixture
def make(source: Path, target: Path) -> Callable[[], Build]:
    files.make_cache_folder()
    return lambda: Build(make_recipe(source), target)


Make = Callable[[], Build]


def ignore(is_elsewhere: bool) -> None:
    pass


def runs(log: Path) -> int:
    return len(log.read_text().splitlines())


def names(folder: Path) -> set[str]:
    return {file.name for file in folder.iterdir()}


def test_only_the_file_and_its_lock_remain(
    make: Make, copying_compiler: Path, target: Path, built: Path
) -> None:
    make().run_in_cache(ignore)
    assert names(target.parent) == {target.name, f"{target.name}.lock"}
    assert target.read_bytes() == built.read_bytes()
    make().run_in_cache(ignore)
    assert runs(copying_compiler) == 1
    make().run_in_cache(ignore, force=True)
    assert runs(copying_compiler) == 2


def test_many_at_once_compile_once(make: Make, copying_compiler: Path, target: Path) -> None:
    in_threads(lambda _: make().run_in_cache(ignore))
    assert target.exists()
    assert runs(copying_compiler) == 1


def test_the_next_tries_again_after_a_failure(
    make: Make, compiler: Compiler, built: Path, target: Path
) -> None:
    compiler("exit 1")
    with pytest.raises(NativeUnavailableError, match="failed with exit code 1"):
        make().run_in_cache(ignore)
    assert names(target.parent) == {f"{target.name}.lock"}
    compiler(f'cp {built} "$target"')
    make().run_in_cache(ignore)
    assert target.exists()


def test_files_of_a_killed_process_are_removed(
    make: Make, copying_compiler: Path, target: Path
) -> None:
    left = target.with_name(f"{target.name}.abcd.build")
    left.mkdir()
    make().run_in_cache(ignore)
    assert not left.exists()


def test_stop_kills_the_compiler_and_its_children(
    make: Make, compiler: Compiler, target: Path, tmp_path: Path
) -> None:
    compiler(f"sleep 60 & echo $! > {tmp_path}/number; wait")
    build = make()
    errors = []

    def run() -> None:
        try:
            build.run_in_cache(ignore)
        except NativeUnavailableError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    until = time.monotonic() + 30
    while not (tmp_path / "number").exists() or not (tmp_path / "number").read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    build.stop()
    thread.join(30)
    assert build.is_stopped
    assert ["signal 9" in error for error in errors] == [True]
    assert names(target.parent) == {f"{target.name}.lock"}
    number = int((tmp_path / "number").read_text())
    while Path(f"/proc/{number}").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_stop_ends_the_wait_for_another_process(
    make: Make, copying_compiler: Path, target: Path
) -> None:
    build = make()
    with open(f"{target}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        build.stop()
        with pytest.raises(NativeUnavailableError, match="the program exited first"):
            build.run_in_cache(ignore)
    assert runs(copying_compiler) == 0


def test_interrupt_ends_the_compiler(make: Make, compiler: Compiler, target: Path) -> None:
    compiler("sleep 60")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    started = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            make().run_in_cache(ignore)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < 30
    assert names(target.parent) == {f"{target.name}.lock"}


def test_lock_file_that_cannot_be_written(make: Make, target: Path) -> None:
    Path(f"{target}.lock").mkdir()
    with pytest.raises(
        NativeUnavailableError, match=r"\.lock cannot be written to: Is a directory"
    ):
        make().run_in_cache(ignore)


def test_compiler_runs_in_a_folder_of_its_own(
    make: Make, compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compiler(f"pwd > {tmp_path}/folder; echo $TMPDIR >> {tmp_path}/folder; exit 1")
    with pytest.raises(NativeUnavailableError):
        make().run_in_cache(ignore)
    folders = {Path(line) for line in (tmp_path / "folder").read_text().splitlines()}
    assert [folder.suffix for folder in folders] == [".build"]


def test_message_is_cut_and_cannot_control_a_terminal(make: Make, compiler: Compiler) -> None:
    compiler(
        "head -c 1000000 /dev/zero | tr '\\0' x >&2\n"
        "printf '\\033]0;title\\007 \\033[2J \\302\\233m \\342\\200\\256 \\377 end' >&2; exit 1"
    )
    with pytest.raises(NativeUnavailableError) as caught:
        make().run_in_cache(ignore)
    message = str(caught.value)
    assert len(message) < 9000
    assert message.endswith(" end")
    assert all(character.isprintable() or character == "\n" for character in message)


def test_file_that_cannot_be_executed(
    make: Make, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "no-program"
    script.write_text("")
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    with pytest.raises(NativeUnavailableError, match=r"no-program cannot be run: Exec format"):
        make().run_in_cache(ignore)


def test_build_compiles_for_this_python(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "_call_path.so"
    Build(make_recipe(source), target).run()
    program = "import _call_path; print(_call_path.__name__)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout == "_call_path\n"
