"""The device of the tests in this folder: the simulated one, or a GPU.

`TORCHOP_TEST_DEVICE=cuda:0 python -m pytest tests/integration/device` runs them on a GPU, and
leaves out what is about the stand-in itself; `nox -s gpu` does that and more. Where there is one
device of a type, it is the second one, too.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests._support.devices import DEVICE
from tests.integration.device import standin

TYPE = DEVICE.type
IS_STANDIN = TYPE == "standin"
COUNT = 1 if TYPE == "cpu" else torch.accelerator.device_count()
FIRST = "cpu" if TYPE == "cpu" else f"{TYPE}:0"
SECOND = "cpu" if TYPE == "cpu" else f"{TYPE}:{min(1, COUNT - 1)}"

only_on_the_standin = pytest.mark.skipif(not IS_STANDIN, reason="about the stand-in")
needs_accelerator = pytest.mark.skipif(TYPE == "cpu", reason="needs an accelerator")
needs_cuda = [
    pytest.mark.cuda,
    pytest.mark.skipif(TYPE != "cuda", reason="needs a CUDA device"),
]

_notes: list[str] = []


def module() -> ModuleType:
    """Return the device's equivalent of `torch.cuda`."""
    return torch.get_device_module(TYPE)


def note(line: str) -> None:
    """Add a line to the trace, so that a kernel of a test shows in it."""
    if IS_STANDIN:
        standin.note(line)
    else:
        _notes.append(line)


def current_place() -> str:
    """Return the current device and stream of this thread, such as `1.0`."""
    if TYPE == "cpu":
        return "cpu"
    index, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()
    return f"{index}.{stream.stream_id}"


@contextlib.contextmanager
def trace() -> Iterator[list[str]]:
    """Yield a list that holds, after the block, what was noted, and where the host waited.

    The stand-in also tells what ran, and where.
    """
    if IS_STANDIN:
        with standin.trace() as lines:
            yield lines
        return
    _notes.clear()
    with host_waits() as waits:
        found: list[str] = []
        yield found
    found += _notes
    found += [f"host waits: {wait}" for wait in waits]


@contextlib.contextmanager
def host_waits() -> Iterator[list[str]]:
    """Yield a list that holds, after the block, why the host waited for a device: each time."""
    if IS_STANDIN:
        with standin.host_waits() as waits:
            yield waits
        return
    waits = []
    if TYPE != "cuda":  # whose waits nobody tells
        yield waits
        return
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode(before)
    waits += [str(each.message) for each in caught if "called a synchroniz" in str(each.message)]
