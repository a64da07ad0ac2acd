"""Terminals, for tests of what is on a screen: what a program writes, and what that looks like."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import termios
from collections.abc import Callable, Iterator
from typing import TextIO


@contextlib.contextmanager
def terminal(columns: int) -> Iterator[tuple[Callable[[], str], TextIO]]:
    """Yields a function that returns what was written so far, and the file to write to.

    A terminal with no columns does not know its width.
    """
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    os.set_blocking(reader, False)

    def written() -> str:
        with contextlib.suppress(BlockingIOError):
            while block := os.read(reader, 1 << 16):
                read.append(block)
        return b"".join(read).decode()

    read: list[bytes] = []
    try:
        with open(writer, "w", encoding="utf-8") as file:
            yield written, file
    finally:
        os.close(reader)


def screen(written: str, columns: int) -> list[str]:
    """The lines on the screen of a terminal of this width."""
    lines: list[list[str]] = [[]]
    column = 0
    for character in written:
        if character == "\r":
            column = 0
        elif character == "\n":
            lines.append([])
        else:
            if column == columns:  # only now: a full line does not move the cursor on
                lines.append([])
                column = 0
            lines[-1][column : column + 1] = [character]
            column += 1
    shown = ["".join(line).rstrip() for line in lines]
    return shown if shown[-1] else shown[:-1]
