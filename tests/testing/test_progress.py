"""The bar on a terminal."""

from __future__ import annotations

import io
import sys

import pytest

from torchop.testing._progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_only_a_terminal_shows_it(
    stream: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", stream())
    with progress_bar() as show:
        show("ns::op", 1, 2)
    assert ("ns::op" in sys.stderr.getvalue()) is (stream is Terminal)
