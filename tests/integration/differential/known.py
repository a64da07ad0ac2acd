"""Known differences between native and dispatched calls. The list should be empty.

If a change of `src/` removes a difference, remove its entry. Never add an entry only to make a test
pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from tests._support.devices import DEVICE
from tests._support.releases import is_older
from tests.integration.differential.observe import Example


class Known(NamedTuple):
    """A known difference.

    `what` describes it, `where` is a pattern for the path of the values that differ, and `when`
    returns whether an example is affected.
    """

    what: str
    where: str
    when: Callable[[Example], bool] = lambda example: True


KNOWN: tuple[Known, ...] = ()
# Examples that are skipped, because they hang or crash the process.
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
