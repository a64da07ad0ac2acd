"""Differences between the two paths that are known, and wait to be resolved: best is an empty list.

A fix in `src/` takes its entry away here; nothing else may be added to make a test pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tests._support.devices import DEVICE
from tests._support.releases import is_older
from tests.integration.differential.observe import Example


class Known(NamedTuple):
    """A known difference: where it shows, as a pattern, and in which examples."""

    what: str
    where: str
    when: Callable[[Example], bool] = lambda example: True


KNOWN: tuple[Known, ...] = ()
# Those that cannot be run at all.
HANGS: tuple[Known, ...] = (
    Known(
        "PyTorch 2.11's profiler ends the process once a plug-in has named its device.",
        where="",
        when=lambda example: (
            DEVICE.type != "cpu" and example.situation == "profiler" and is_older("2.13")
        ),
    ),
)


def hangs(example: Example) -> bool:
    """Return whether an example is known not to end."""
    return any(known.when(example) for known in HANGS)


def unknown(example: Example, differences: list[str]) -> list[str]:
    """The differences that are not known."""
    known = [entry for entry in KNOWN if entry.when(example)]
    return [line for line in differences if not any(re.search(k.where, line) for k in known)]
