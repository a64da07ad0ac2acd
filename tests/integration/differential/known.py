"""Known differences between native and dispatched calls; the list should be empty.

Remove an entry when `src/` is fixed. Never add one to make a test pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tests._support.devices import DEVICE
from tests._support.releases import is_older
from tests.integration.differential.observe import Example


class Known(NamedTuple):
    """A description, a pattern for the place of the difference, and the affected examples."""

    what: str
    where: str
    when: Callable[[Example], bool] = lambda example: True


KNOWN: tuple[Known, ...] = ()
# Examples that hang or end the process.
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
    return any(known.when(example) for known in HANGS)


def unknown(example: Example, differences: list[str]) -> list[str]:
    known = [entry for entry in KNOWN if entry.when(example)]
    return [line for line in differences if not any(re.search(k.where, line) for k in known)]
