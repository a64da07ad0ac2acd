"""The line on stderr."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import pytest

from torchop._native.extension.notice import Notice

pty = pytest.importorskip("pty", reason="the platform has no terminals of this kind")


@contextlib.contextmanager
def terminal() -> Iterator[int]:
    """Makes stderr a terminal; its other end, to read from.

    Not a fixture: pytest sets stderr anew between a fixture and its test.
    """
    ours, theirs = pty.openpty()
    with pytest.MonkeyPatch.context() as patch, open(theirs, "w") as stream:
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "stderr", stream)
        assert Notice().counts
        yield ours
    os.close(ours)


def line_on(screen: int) -> str:
    """What was written up to the end of a line; a terminal may hand it on in pieces."""
    text = b""
    while not text.endswith(b"\n"):
        text += os.read(screen, 1000)
    return text.decode()


def test_file_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    notice = Notice()
    notice.start()
    notice.tick()
    notice.finish("done")
    assert capsys.readouterr().err == (
        "torchop: compiling its native call path, once (TORCHOP_NATIVE=0 turns it off)\n"
    )


def test_terminal_gets_one_line_that_counts() -> None:
    with terminal() as screen:
        notice = Notice()
        notice.start()
        notice.tick()
        notice.finish("done")
        text = "torchop: compiling its native call path, once ..."
        assert line_on(screen) == f"{text}\r{text} 0 s\r{text} 0 s, done\r\n"


def test_line_is_ended_when_the_program_ends_before_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at_exit: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_exit.append)
    with terminal() as screen:
        Notice().start()
        (end,) = at_exit
        end()
        assert line_on(screen).endswith(" 0 s, goes on in the background\r\n")


def test_what_was_not_started_is_not_finished() -> None:
    with terminal() as screen:
        notice = Notice()
        notice.tick()
        notice.finish("failed")
        os.set_blocking(screen, False)
        with pytest.raises(BlockingIOError):
            os.read(screen, 1000)


def test_narrow_terminal_gets_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal():
        monkeypatch.setenv("COLUMNS", "50")
        assert not Notice().counts


def test_prompt_is_not_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal():
        monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
        assert not Notice().counts


def test_no_stderr_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    notice = Notice()
    notice.start()
    notice.finish("done")
    assert not notice.counts
