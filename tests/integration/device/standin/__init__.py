"""A simulated device with two indices, `standin:0` and `standin:1`, in host memory.

`load` registers it with PyTorch, as a plug-in for a device does (the key PrivateUse1), after which
`torch.device("standin")`, `torch.standin` and `torch.accelerator` work. A process has one backend
of that kind, and keeps it. See `tests/integration/device/conftest.py` for how tests use it.

What it has: memory that only copies may read; streams and events, which note the order of things;
a device guard; generators; pinned memory; autocast; statistics of memory, and its end on request;
graphs that are captured and replayed; an operator without a kernel runs on the CPU. `csrc` has a
file for each.
"""

from __future__ import annotations

import contextlib
import gc
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
    """Make the device known to PyTorch; compiles it before, if need be (20 seconds).

    Operators that it has no kernel for run on the CPU; with `STANDIN_FALLBACK=pytorch`, only those
    of PyTorch, as on a GPU, and with `STANDIN_FALLBACK=0`, none. With `STANDIN_PROTECT=0`, the host
    can read its memory, and nothing is spent on that.
    """
    global _native, _module
    # It makes tensors while it is imported, which modes and default devices would intercept.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PyTorch, for itself
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
    """Yield a list that holds, after the block, what happened on the devices, in order.

    Lines are such as `aten::add.Tensor on 1.0` (device 1, stream 0), `record an event on 0.3`,
    `keep memory for 0.3` and `host waits: read a value`.
    """
    lines: list[str] = []
    _native.trace(True)
    try:
        yield lines
    finally:
        lines += _native.trace(False)


@contextlib.contextmanager
def host_waits() -> Iterator[list[str]]:
    """Yield a list that holds, after the block, why the host waited for a device: each time."""
    waits: list[str] = []
    with trace() as lines:
        yield waits
    waits += [line[len(_HOST_WAITS) :] for line in lines if line.startswith(_HOST_WAITS)]


def note(line: str) -> None:
    """Add a line to the trace, so that a kernel of a test shows in it."""
    _native.note(line)


def current_place() -> str:
    """Return the current device and stream of this thread, such as `1.0`."""
    return _native.current_place()


@contextlib.contextmanager
def capture(pool: int = 0) -> Iterator[Any]:
    """A block that is captured into a graph, on the current stream; yields the graph.

    The default stream cannot be captured, so that one of its own takes its place. As on CUDA, some
    things are refused meanwhile, such as waiting of the host, reading the state of a generator, and
    copying from memory that is not pinned; what it allocates is of a private pool, or of that of
    another graph. `graph.replay()` does the work of the block again, in the same memory. If some of
    that was given back, it raises an exception, where CUDA would use it.
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
            with contextlib.suppress(RuntimeError):  # of work that was not joined
                graph.end()
            raise
        graph.end()


@contextlib.contextmanager
def memory_limit(room: int) -> Iterator[None]:
    """A block in which the devices have room for so many bytes more than they hold now.

    An allocation beyond that raises `torch.OutOfMemoryError`. Memory comes in pages of 4 KiB.
    """
    gc.collect()  # or what is freed in the block would be room as well
    _native.limit_memory(room)
    try:
        yield
    finally:
        _native.limit_memory(None)


@contextlib.contextmanager
def without_fallback() -> Iterator[None]:
    """A block in which the CPU stands in for no operator that the device has no kernel for."""
    was_on = _native.set_fallback(False)
    try:
        yield
    finally:
        _native.set_fallback(was_on)
