"""Read and set a thread's autocast state."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

import torch

from torchop._compat import dispatch
from torchop._errors import short_errors

# One (device type, autocast dtype) pair for each device type that has autocast enabled
State: TypeAlias = tuple[tuple[str, torch.dtype], ...]

is_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
device_types: Callable[[], list[str]] = torch._C._autocast_supported_devices
_FIRST_NAMES = tuple(device_types())  # read before a program can rename a custom backend


def is_available(device_type: str) -> bool:
    with short_errors:
        return torch._C._is_autocast_available(device_type)


def is_enabled_for(device_type: str) -> bool:
    return is_available(device_type) and torch.is_autocast_enabled(device_type)


def state() -> State:
    """Return this thread's autocast state. Devices with an excluded autocast key are disabled."""
    # Compiled autograd traces this function, and Dynamo cannot trace `device_types`.
    names = _FIRST_NAMES if torch.compiler.is_dynamo_compiling() else device_types()
    return tuple(
        (name, torch.get_autocast_dtype(name)) for name in names if torch.is_autocast_enabled(name)
    )


class _OfKernel(threading.local):
    state: State | None = None  # set while `traced_in` is active
    disabled: frozenset[str] = frozenset()  # device types, set while `disabled` is active


_of_kernel = _OfKernel()


def disabled(device_type: str, key: str) -> contextlib.AbstractContextManager[None]:
    """Disable autocast for a device type. `key` is its dispatch key, such as "AutocastCPU"."""
    keys = dispatch.without_keys(key)
    # Only dispatch modes read the kernel's autocast state from `_of_kernel`, so skip storing it if
    # no mode is active.
    return _disabled(device_type, keys) if dispatch.dispatch_modes_are_active() else keys


@contextlib.contextmanager
def _disabled(device_type: str, keys: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    before = _of_kernel.disabled
    _of_kernel.disabled = before | {device_type}
    try:
        with keys:
            yield
    finally:
        _of_kernel.disabled = before


@contextlib.contextmanager
def traced_in(state: State) -> Iterator[None]:
    """Apply the traced autocast state while `torchop::in_autocast` calls an operator."""
    before = _of_kernel.state, _of_kernel.disabled
    _of_kernel.state, _of_kernel.disabled = state, frozenset()
    try:
        with restored(state):
            yield
    finally:
        _of_kernel.state, _of_kernel.disabled = before


def state_of_kernel() -> State:
    """Return the autocast state in which the kernel runs. Call this only from a mode's handler.

    While the handler of a dispatch mode runs, PyTorch excludes the autocast keys, so autocast would
    look disabled. So read the state under the dispatch keys that were active before the outermost
    call.
    """
    found = _of_kernel.state
    if found is None:
        try:
            keys = torch._C._RestorePythonTLSSnapshot()  # type: ignore[attr-defined]
        except RuntimeError:  # no handler is running
            keys = contextlib.nullcontext()
        with keys:
            found = state() if is_enabled() else ()
    return tuple(each for each in found if each[0] not in _of_kernel.disabled)


def in_state_of_kernel() -> contextlib.AbstractContextManager[None]:
    """Return a context manager that applies the kernel's autocast state in a mode's handler."""
    wanted = state_of_kernel()
    return restored(wanted) if wanted else contextlib.nullcontext()


@contextlib.contextmanager
def restored(saved: State | None) -> Iterator[None]:
    """Enable autocast only for the devices in `saved`, and restore the previous state afterwards.

    `torch.autocast` cannot be used here, because it rejects devices that are missing on this
    machine. The autocast cache is disabled inside the block, since it would keep the cast tensors
    alive.
    """
    before, wanted = dict(state()), dict(saved or ())
    is_caching = torch.is_autocast_cache_enabled()
    dtypes = {name: torch.get_autocast_dtype(name) for name in wanted}

    def enable(dtypes: Mapping[str, torch.dtype], enabled: Mapping[str, torch.dtype]) -> None:
        for name, dtype in dtypes.items():
            torch.set_autocast_dtype(name, dtype)
        for name in before.keys() | wanted.keys():
            torch.set_autocast_enabled(name, name in enabled)

    torch.set_autocast_cache_enabled(False)
    try:
        enable(wanted, wanted)
        yield
    finally:
        enable(dtypes, before)
        torch.set_autocast_cache_enabled(is_caching)
