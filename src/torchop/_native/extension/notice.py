"""What users see of a build: one line on stderr.

On a terminal, the line counts the seconds until the build is done.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import sys
import time

from torchop._native.extension.exiting import not_exiting

# Shorter than a line of a terminal, or it could not be written over.
_TEXT = "torchop: compiling its native call path, once"


class Notice:
    """The line about one build."""

    def __init__(self) -> None:
        self.counts = _is_terminal()
        self._started: float | None = None

    def start(self) -> None:
        """Shows the line."""
        with not_exiting:
            self._started = time.monotonic()
            if self.counts:
                self._write(f"{_TEXT} ...")
                atexit.register(self._leave)
            else:
                self._write(f"{_TEXT} (TORCHOP_NATIVE=0 turns it off)\n")

    def tick(self) -> None:
        """Writes the seconds that have passed, on a terminal."""
        with not_exiting:
            if self.counts and self._started is not None:
                self._write(f"\r{_TEXT} ... {time.monotonic() - self._started:.0f} s")

    def finish(self, outcome: str) -> None:
        """Ends the line, on a terminal: `done`, `failed`."""
        with not_exiting:
            if self.counts and self._started is not None:
                self.tick()
                self._write(f", {outcome}\n")
                self._started = None
                atexit.unregister(self._leave)

    def _leave(self) -> None:
        self.finish("goes on in the background")

    def _write(self, text: str) -> None:
        # A program may have closed its stderr, or have none, as under pythonw.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if self.counts:
                # Past Python's buffer, so that there is no lock of a stream to die with.
                os.write(sys.stderr.fileno(), text.encode())
            else:
                sys.stderr.write(text)
                sys.stderr.flush()


def _is_terminal() -> bool:
    if hasattr(sys, "ps1"):
        return False  # somebody types at a prompt, which a line that changes would overwrite
    try:
        wide_enough = shutil.get_terminal_size().columns >= len(_TEXT) + 20
        return sys.stderr.isatty() and wide_enough
    except (OSError, ValueError, AttributeError):
        return False
