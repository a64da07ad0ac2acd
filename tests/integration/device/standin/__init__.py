"""A simulated device type with two devices, `standin:0` and `standin:1`, in host memory.

`load` registers the device type with PyTorch as PrivateUse1, like a plug-in for a real device.
Afterwards `torch.device("standin")`, `torch.standin` and `torch.accelerator` work. A process can
register only one device type as PrivateUse1, and cannot remove it.
`tests/integration/device/conftest.py` explains how to use the device in tests.

The files of `csrc` implement protected memory with statistics and limits, streams and events, a
device guard, generators, pinned memory, autocast, capture and replay of graphs, and a fallback that
runs operators on the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from tests.integration.device.standin.build import load as load_extension
from tests.integration.device.standin.module import make_module

_HOST_WAITS = "host waits: "
_native: ModuleType
_module: ModuleType


def load() -> None:
    """Register the device type. If it has not been compiled yet, this takes 20 seconds.

    Operators without a kernel for the device run on the CPU. With `STANDIN_FALLBACK=pytorch`, only
    PyTorch's own operators do, as if the device were a GPU. With `STANDIN_FALLBACK=0`, none do.
    With `STANDIN_PROTECT=0`, the host can read the device's memory, which is faster.
    """
    global _native, _module
    # This module of PyTorch creates tensors when it is imported. Import it now, because a mode or a
    # default device of a test would intercept the creation of these tensors.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch's own code causes this warning
        importlib.import_module("torch._decomp.decompositions_for_jvp")
    torch.utils.rename_privateuse1_backend("standin")
    _native = load_extension()
    _module = make_module(_native)
    torch._register_device_module("standin", _module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    if (fallback := os.environ.get("STANDIN_FALLBACK")) == "pytorch":
        _native.add_kernels()
    elif fallback != "0":
        _native.set_fallback(True)


@contextlib.contextmanager
def trace() -> Iterator[list[str]]:
    """Yield a list that, after the block, contains all operations of the devices, in order.

    Lines look like `aten::add.Tensor on 1.0` (device 1, stream 0), `record an event on 0.3`, `keep
    memory for 0.3` and `host waits: read a value`.
    """
    lines: list[str] = []
    _native.trace(True)
    try:
        yield lines
    finally:
        lines += _native.trace(False)


@contextlib.contextmanager
def host_waits() -> Iterator[list[str]]:
    """Yield a list that, after the block, contains the reason of each wait of the host."""
    waits: list[str] = []
    with trace() as lines:
        yield waits
    waits += [line[len(_HOST_WAITS) :] for line in lines if line.startswith(_HOST_WAITS)]


def note(line: str) -> None:
    """Add a line to the trace, for example from a kernel of a test."""
    _native.note(line)


def current_place() -> str:
    return _native.current_place()


@contextlib.contextmanager
def capture(pool: int = 0) -> Iterator[Any]:
    """Capture the block into a graph, and yield the graph.

    If the current stream is the default stream, which cannot be captured, the block runs on a new
    stream. As on CUDA, some operations raise in the block: operations for which the host waits,
    reading the state of a generator, and copies from unpinned memory. The block allocates memory
    from a new pool or from `pool`, the pool of another graph. `graph.replay()` repeats the work in
    the same memory. If any of that memory was freed, `replay` raises, whereas CUDA would overwrite
    the memory.
    """
    graph = _native.Graph()
    stream = torch.accelerator.current_stream()
    if stream.stream_id == 0:
        stream = torch.Stream(stream.device)
    with _module.stream(stream):
        graph.begin(pool)
        try:
            yield graph
        except BaseException:
            # `end` may raise because of streams that did not join the capture. Suppress that error,
            # because it would hide the original exception.
            with contextlib.suppress(RuntimeError):
                graph.end()
            raise
        graph.end()


@contextlib.contextmanager
def memory_limit(room: int) -> Iterator[None]:
    """Limit the devices to `room` more bytes in the block.

    An allocation beyond the limit raises `torch.OutOfMemoryError`. Each allocation takes whole
    pages of 4 KiB. Memory that was allocated before the block and is freed in it does not count.
    """
    _native.limit_memory(room)
    try:
        yield
    finally:
        _native.limit_memory(None)


@contextlib.contextmanager
def without_fallback() -> Iterator[None]:
    """Turn off the CPU fallback in the block, so operators without a device kernel raise."""
    was_on = _native.set_fallback(False)
    try:
        yield
    finally:
        _native.set_fallback(was_on)
