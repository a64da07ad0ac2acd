"""The process of its own for each operator: how it ends, and what it leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from torchop.testing import _processes
from torchop.testing._processes import ChildError, answers


def starts_another_and_aborts() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    yield pid
    os.abort()


def writes(size: int) -> Iterator[Any]:
    for _ in range(4):
        os.write(1, b"x" * size)
        yield None
    time.sleep(2)  # longer than it takes to look
    os.write(1, b"the end")
    yield None


def computes(size: int) -> Iterator[tuple[float, int, str | None]]:
    total = float(torch.ones(size).add(1).sum())
    yield total, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def runs(pid: int) -> bool:
    """Whether a process is there, and has not ended without being waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    """Whether a process ends within a minute."""
    end = time.monotonic() + 60
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not runs(pid)


def test_end_is_seen_though_another_process_holds_the_pipe(tmp_path: Path) -> None:
    output = tmp_path / "output"
    with answers(
        "forkserver", starts_another_and_aborts, (), repeat(600), Exception, output
    ) as messages:
        pid = next(messages)
        assert runs(pid)
        with pytest.raises(ChildError, match="ended the process, by SIGABRT"):
            next(messages)
    assert ends(pid)


def waits() -> Iterator[int]:
    yield os.getpid()
    time.sleep(600)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
def test_a_child_ends_with_the_program_even_if_that_is_killed() -> None:
    read, write = os.pipe()
    program = os.fork()
    if program == 0:
        with answers("fork", waits, (), repeat(60), Exception) as messages:
            os.write(write, str(next(messages)).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(program, 0)
    os.close(write)
    pid = int(os.read(read, 20))
    os.close(read)
    assert ends(pid)


def test_a_fork_has_the_threads_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those of the server, which has one, so that it leaves no fork without them."""
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with answers("forkserver", computes, (2**20,), repeat(600), Exception) as messages:
        total, threads, most = next(messages)
    assert (total, threads, most) == (2.0**21, torch.get_num_threads(), "5")
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_output_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_processes, "_MOST_OUTPUT", 1000)
    output = tmp_path / "output"
    with answers("forkserver", writes, (800,), repeat(600), Exception, output) as messages:
        assert list(messages) == [None] * 5
    assert output.stat().st_size < 1000
    assert output.read_bytes().endswith(b"the end")


def tells_what_it_does() -> Iterator[Any]:
    yield "sleeping"
    yield 1
    time.sleep(600)


def test_an_error_says_what_the_process_was_doing() -> None:
    with answers(
        "forkserver", tells_what_it_does, (), chain([600], repeat(0.5)), Exception
    ) as messages:
        assert next(messages) == 1
        with pytest.raises(ChildError, match=r"^sleeping took over 0 seconds$"):
            next(messages)


def refuses() -> Iterator[int]:
    yield 1
    raise ValueError("no second one")


def test_an_error_that_is_asked_for_is_raised_here_and_others_end_the_process() -> None:
    with answers("fork", refuses, (), repeat(60), ValueError) as messages:
        assert next(messages) == 1
        with pytest.raises(ValueError, match=r"^no second one$"):
            next(messages)
    with answers("fork", refuses, (), repeat(60), TypeError, Path(os.devnull)) as messages:
        assert next(messages) == 1
        with pytest.raises(ChildError, match="ended the process, with exit code 1"):
            next(messages)


def test_a_fork_that_cannot_tell_whether_it_uses_accelerators_is_asked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def cannot_be_started(method: str, *args: object) -> None:
        asked.append(method)
        raise ChildError("no process", "can be started for it")

    monkeypatch.setattr(_processes, "answers", cannot_be_started)
    monkeypatch.setattr(_processes.devices, "accelerator", lambda: "one")
    _processes.method_for_modules.cache_clear()
    try:
        assert [_processes.method_for_modules() for _ in range(3)] == ["spawn"] * 3
    finally:
        _processes.method_for_modules.cache_clear()
    assert asked == ["forkserver"]
