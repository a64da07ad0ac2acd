"""Starting the process that compiles, and waiting for it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from torchop._errors import NativeUnavailableError
from torchop._native.extension import child, files, worker
from torchop._native.extension.recipe import recipe

Compiler = Callable[[str], Path]


def test_background_is_out_of_the_reach_of_the_terminal_and_polite(
    cache_folder: Path, source: Path, compiler: Compiler
) -> None:
    compiler('touch "$target"; nice >&2; exit 1')
    for background, niceness in ((True, min(os.nice(0) + 10, 19)), (False, os.nice(0))):
        process = child.start(recipe(source), files.make_folder(), background=background)
        assert (os.getsid(process.pid) == process.pid) is background
        with pytest.raises(NativeUnavailableError, match=f":\n{niceness}$"):
            child.wait(process)


def test_process_that_is_killed_says_by_what(
    cache_folder: Path, source: Path, compiler: Compiler
) -> None:
    compiler("kill -9 $PPID")
    with pytest.raises(NativeUnavailableError, match="ended by signal 9; signal 9 means"):
        child.wait(child.start(recipe(source), files.make_folder()))


def test_process_that_crashes_says_how(
    cache_folder: Path, source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = cache_folder.parent / "broken.py"
    broken.write_text("raise ValueError('a bug of ours')")
    compiler("")
    monkeypatch.setattr(worker, "__file__", str(broken))
    with pytest.raises(NativeUnavailableError, match="ValueError: a bug of ours"):
        child.wait(child.start(recipe(source), files.make_folder()))


def test_interrupt_ends_the_process(cache_folder: Path, source: Path, compiler: Compiler) -> None:
    compiler("exec sleep 30")
    process = child.start(recipe(source), files.make_folder())

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


def test_program_with_python_built_in_is_not_started_again(
    cache_folder: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(NativeUnavailableError, match=r"Python built in.*TORCHOP_NATIVE_DIR"):
        child.start(recipe(source), files.make_folder())


def test_process_that_cannot_be_started(
    cache_folder: Path, source: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    compiler("")
    monkeypatch.setattr(subprocess, "Popen", no_memory)
    with pytest.raises(NativeUnavailableError, match=r"cannot be started: .*allocate memory"):
        child.start(recipe(source), files.make_folder())
