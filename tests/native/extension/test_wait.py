"""Waiting for the extension, in threads and forked processes. Uses private names."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests._support.common import in_threads
from torchop._native.extension.api import (
    NOTICE,
    NOTICE_IN_BACKGROUND,
    NOTICE_OF_ANOTHER,
    Extension,
)
from torchop.native import NativeUnavailableError

Compiler = Callable[[str], Path]

pytestmark = pytest.mark.usefixtures("cache_folder")

FAILED = (
    r"^torchop\.native\.wait: the native call path is not available, so calls take longer\. "
    r"Fix the problem, run `python -m torchop build`, and restart this program. Or set "
    r"TORCHOP_NATIVE=0, which makes `wait` return False\. The problem: "
)


def ignore(module: ModuleType) -> None:
    pass


@pytest.fixture
def extension(source: Path) -> Extension:
    return Extension(source)


@pytest.fixture
def held(compiler: Compiler, built: Path, tmp_path: Path) -> Path:
    """Use a fake compiler that waits until the returned file exists, then copies an extension."""
    signal = tmp_path / "signal"
    compiler(f'until test -e {signal}; do sleep 0.01; done; cp {built} "$target"')
    return signal


# --------------------------------------------------------------------------------------------------
# The extension becomes available


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_wait_compiles_and_loads(
    extension: Extension, copying_compiler: Path, timeout: float | None
) -> None:
    assert extension.wait(ignore, timeout)
    assert extension.status().state == "ready"
    assert len(copying_compiler.read_text().splitlines()) == 1


@pytest.mark.usefixtures("in_cache")
@pytest.mark.parametrize("mode", ["auto", "require", "prebuilt"])
def test_existing_extension_needs_no_wait(
    extension: Extension, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", mode)
    assert extension.wait(ignore, 0)


def test_timeout_does_not_stop_the_compiler(extension: Extension, held: Path) -> None:
    assert not extension.wait(ignore, 0)
    start = time.monotonic()
    assert not extension.wait(ignore, 0.2)
    assert 0.2 <= time.monotonic() - start < 5
    assert extension.status().state == "building"
    held.touch()
    assert extension.wait(ignore, None)


def test_threads_wait_for_the_one_that_is_loading_it(extension: Extension, in_cache: Path) -> None:
    def load_slowly(module: ModuleType) -> None:
        time.sleep(0.2)

    assert in_threads(lambda _: extension.wait(load_slowly, None)) == [True] * 8


def test_interrupt_ends_the_wait_and_not_the_compiler(extension: Extension, held: Path) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            extension.wait(ignore, None)
    finally:
        signal.signal(signal.SIGALRM, before)
    held.touch()
    assert extension.wait(ignore, None)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("is_over", [False, True])
def test_child_of_a_fork_waits_itself(extension: Extension, held: Path, is_over: bool) -> None:
    assert not extension.wait(ignore, 0)
    if is_over:
        held.touch()
        assert extension.wait(ignore, None)
    waiting = threading.Thread(target=extension.wait, args=(ignore, None))
    # `fork` copies only the thread that calls it, so the child process does not have this thread.
    waiting.start()
    process = os.fork()
    if process == 0:
        signal.alarm(60)
        extension.after_fork()
        there_at_once = extension.wait(ignore, 0)
        held.touch()
        os._exit(0 if extension.wait(ignore, None) and there_at_once is is_over else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
    waiting.join(60)
    assert extension.status().state == "ready"


# --------------------------------------------------------------------------------------------------
# The extension does not become available


def test_turned_off(extension: Extension, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "0")
    assert not extension.wait(ignore, None)
    assert extension.status().state == "off"


def test_compiler_that_fails_is_an_exception_and_no_warning(
    extension: Extension, compiler: Compiler
) -> None:
    compiler("echo 'fatal error' >&2; exit 1")
    for _ in range(2):
        with pytest.raises(NativeUnavailableError, match=rf"{FAILED}.*exit code 1:\nfatal error"):
            extension.wait(ignore, None)


def test_no_compiler_is_an_exception_and_no_warning(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NativeUnavailableError, match=rf"{FAILED}there is no C\+\+ compiler"):
        extension.wait(ignore, 0)


def test_wait_fails_if_nothing_is_prebuilt(
    extension: Extension, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHOP_NATIVE", "prebuilt")
    with pytest.raises(NativeUnavailableError, match=f"{FAILED}.*prebuilt does not compile"):
        extension.wait(ignore, None)


# --------------------------------------------------------------------------------------------------
# Notices during the wait


def test_wait_prints_no_notice_to_wait(
    extension: Extension, copying_compiler: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert extension.wait(ignore, None)
    notice, ready = capsys.readouterr().err.splitlines()
    assert notice == NOTICE
    assert "wait" not in notice
    assert re.fullmatch(r"torchop: native calls are ready, after \d+ s\.", ready)


@pytest.mark.parametrize(("rank", "is_told"), [("", True), ("0", True), ("1", False)])
def test_waiting_for_another_process_is_reported_once_per_machine(
    source: Path,
    held: Path,
    rank: str,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = ""

    def await_notice() -> None:
        nonlocal said
        until = time.monotonic() + 30
        while not (said := said + capsys.readouterr().err):
            assert time.monotonic() < until
            time.sleep(0.01)

    first, second = Extension(source), Extension(source)
    first.obtain(ignore, build=True)
    await_notice()
    assert said == f"{NOTICE_IN_BACKGROUND}\n"
    said = ""
    monkeypatch.setenv("LOCAL_RANK", rank)
    second.obtain(ignore, build=True)
    if is_told:
        await_notice()
        assert said == f"{NOTICE_OF_ANOTHER}\n"
        assert second.status().reason == "another process is compiling it"
    held.touch()
    assert first.wait(ignore, None)
    assert second.wait(ignore, None)
    assert second.status().reason is None
    assert capsys.readouterr().err.count("torchop: native calls are ready") == 1 + is_told
