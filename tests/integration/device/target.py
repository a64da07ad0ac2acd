"""The device of the tests in this folder: the simulated one, or a GPU.

`TORCHOP_TEST_DEVICE=cuda:0 python -m pytest tests/integration/device` uses the GPU and skips the
tests of the simulated device itself. `nox -s gpu` includes that command. FIRST and SECOND are two
devices, or the same device if there is only one.
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
    return torch.get_device_module(TYPE)


def note(line: str) -> None:
    """Add a line to the trace, for example from a kernel of a test."""
    if IS_STANDIN:
        standin.note(line)
    else:
        _notes.append(line)


def current_place() -> str:
    if TYPE == "cpu":
        return "cpu"
    index, stream = torch.accelerator.current_device_index(), torch.accelerator.current_stream()
    return f"{index}.{stream.stream_id}"


@contextlib.contextmanager
def trace() -> Iterator[list[str]]:
    """Yield a list that, after the block, contains the lines from `note` and the waits of the host.

    On the simulated device, the list also contains each operator that ran, with device and stream.
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
    """Yield a list that, after the block, contains the reason of each wait of the host."""
    if IS_STANDIN:
        with standin.host_waits() as waits:
            yield waits
        return
    waits = []
    if TYPE != "cuda":  # only CUDA can report waits
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
