"""The process that compiles: what it leaves behind, and what it says."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

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


def test_last_lines_of_the_compiler_are_the_message(start: Start, compiler: Compiler) -> None:
    compiler("for i in $(seq 99); do echo line $i >&2; done; exit 1")
    with pytest.raises(NativeUnavailableError) as caught:
        child.wait(start())
    first, *lines = str(caught.value).splitlines()
    assert first.endswith("fake-c++ failed with exit code 1:")
    assert lines == [f"line {number}" for number in range(80, 100)]


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
