from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch

from torchop.cli import child_process
from torchop.cli.child_process import ChildError, answers_of


def yields_nothing() -> Iterator[int]:
    yield from ()


def starts_another_and_aborts() -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        time.sleep(600)
    yield pid
    os.abort()


def computes(size: int) -> Iterator[tuple[float, int, str | None]]:
    total = float(torch.ones(size).add(1).sum())
    yield total, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def waits() -> Iterator[int]:
    yield os.getpid()
    time.sleep(600)


def describes_a_step() -> Iterator[Any]:
    yield "sleeping"
    yield 1
    time.sleep(600)


def raises(kind: type[Exception]) -> Iterator[int]:
    yield 1
    raise kind("no second value")


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    end = time.monotonic() + 60
    while runs(pid) and time.monotonic() < end:
        time.sleep(0.05)
    return not runs(pid)


def test_module_that_cannot_be_imported() -> None:
    with (
        answers_of(yields_nothing, (), 60, ["no_such_module_at_all"]) as messages,
        pytest.raises(click.ClickException, match="no_such_module_at_all cannot be imported: Mod"),
    ):
        next(messages)


def test_crash_is_detected_while_a_grandchild_holds_the_pipe() -> None:
    with answers_of(starts_another_and_aborts, (), 600) as messages:
        pid = next(messages)
        assert runs(pid)
        with pytest.raises(ChildError, match="ended the process, by SIGABRT"):
            next(messages)
    assert ends(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills a process with its parent")
# Python warns if a process that has threads is forked.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_child_ends_if_the_program_is_killed() -> None:
    read, write = os.pipe()
    program = os.fork()
    if program == 0:
        with answers_of(waits, (), 60, method="fork") as messages:
            os.write(write, str(next(messages)).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(program, 0)
    os.close(write)
    pid = int(os.read(read, 20))
    os.close(read)
    assert ends(pid)


def test_child_has_the_threads_and_environment_of_the_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child is forked by a forkserver, which has only one thread and an older environment.

    The child must use the number of threads and the environment of the program instead.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    with answers_of(computes, (2**20,), 600) as messages:
        total, threads, most = next(messages)
    assert (total, threads, most) == (2.0**21, torch.get_num_threads(), "5")
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_time_limit_names_the_step() -> None:
    with answers_of(describes_a_step, (), 0.5) as messages:
        assert next(messages) == 1
        with pytest.raises(ChildError, match=r"^sleeping took over 0 seconds$"):
            next(messages)


def test_click_exceptions_are_raised_and_others_kill_the_process() -> None:
    with answers_of(raises, (click.ClickException,), 60, method="fork") as messages:
        assert next(messages) == 1
        with pytest.raises(click.ClickException, match=r"^no second value$"):
            next(messages)
    with answers_of(raises, (TypeError,), 60, method="fork") as messages:
        assert next(messages) == 1
        with pytest.raises(ChildError, match="ended the process, with exit code 1"):
            next(messages)


def test_forkserver_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def cannot_start(method: str, *args: object) -> None:
        tried.append(method)
        raise ChildError("no process could be started")

    monkeypatch.setattr(child_process, "_answers", cannot_start)
    monkeypatch.setattr(child_process.devices, "accelerator", lambda: "one")
    child_process._method_for_modules.cache_clear()
    try:
        assert [child_process._method_for_modules() for _ in range(3)] == ["spawn"] * 3
    finally:
        child_process._method_for_modules.cache_clear()
    assert tried == ["forkserver"]
