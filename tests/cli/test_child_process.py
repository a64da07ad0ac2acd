"""The process of its own for each operator: how it ends, and what it leaves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from torchop.cli import child_process
from torchop.cli.child_process import Child, ChildError


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
    with Child("forkserver", starts_another_and_aborts, (), tmp_path / "output") as child:
        pid = child.receive(600)
        assert runs(pid)
        with pytest.raises(ChildError, match="ended the process, by SIGABRT"):
            child.receive(600)
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
        with Child("fork", waits, ()) as child:
            os.write(write, str(child.receive(60)).encode())
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
    with Child("forkserver", computes, (2**20,), tmp_path / "output") as child:
        total, threads, most = child.receive(600)
    assert (total, threads, most) == (2.0**21, torch.get_num_threads(), "5")
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_output_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_MOST_OUTPUT", 1000)
    output = tmp_path / "output"
    with Child("forkserver", writes, (800,), output) as child:
        for _ in range(5):
            child.receive(600)
    assert output.stat().st_size < 1000
    assert child_process.tail(output).endswith("the end")


def test_tail_is_short_and_of_no_file_empty(tmp_path: Path) -> None:
    (tmp_path / "output").write_bytes(b"x" * 2**20 + b"\xff")
    assert len(child_process.tail(tmp_path / "output")) == 2**16
    assert child_process.tail(tmp_path / "none") == ""
