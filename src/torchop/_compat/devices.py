"""Query the properties of device types, such as "cuda", once per type.

The rest of torchop hardcodes no device type except "cpu", so it works with any accelerator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_accelerator: Any = torch._C._accelerator_getAccelerator


class DeviceTraits(NamedTuple):
    """Properties of a device type.

    Check `is_in_use()` before calling the other functions, because they would initialize the
    device. `is_in_bad_fork()` is true if this process was forked after the device had been
    initialized, so the device is unusable. While `is_capturing()` is true, the current stream is
    being captured into a graph, so synchronizing would fail. The functions that get and set
    generator states are None if the device has no generators. `size_of_state` returns a size in
    bytes, and is safe to call during a capture.
    """

    type: str
    is_in_use: Callable[[], bool]
    is_in_bad_fork: Callable[[], bool]
    device_count: Callable[[], int]
    names: Callable[[], list[str]]
    is_capturing: Callable[[], bool]
    get_rng_state: Callable[[torch.device], torch.Tensor] | None
    set_rng_state: Callable[[torch.Tensor, torch.device], object] | None
    size_of_state: Callable[[torch.device], int]


@functools.cache
def traits(device_type: str) -> DeviceTraits:
    """Return the properties of a device type. Raises for "meta", which has no module in PyTorch."""
    module: Any = torch.get_device_module(device_type)
    is_in_use = getattr(module, "is_initialized", lambda: True)

    def device_count() -> int:
        return int(module.device_count()) if is_in_use() else 0

    def names() -> list[str]:
        name = getattr(module, "get_device_name", lambda index: f"{device_type}:{index}")
        return [str(name(index)) for index in range(module.device_count())]

    return DeviceTraits(
        device_type,
        is_in_use,
        getattr(module, "_is_in_bad_fork", lambda: False),
        device_count,
        names,
        _capture_query(device_type, module),
        getattr(module, "get_rng_state", None),
        getattr(module, "set_rng_state", None),
        functools.cache(_size_of_state),
    )


def accelerator() -> DeviceTraits | None:
    device = _accelerator()
    return None if device is None else traits(device.type)


def accelerator_type() -> str:
    """Return the type of the process's accelerator, or "cuda" if there is none."""
    found = accelerator()
    return "cuda" if found is None else found.type


def accelerator_count() -> int:
    """Return the number of accelerators, or 0 if the program has not initialized them so far."""
    found = accelerator()
    return 0 if found is None else found.device_count()


def accelerators(count: int) -> list[torch.device]:
    return [torch.device(_accelerator().type, index) for index in range(count)]


def are_captured(tensors: list[torch.Tensor]) -> bool:
    types = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
    return any(traits(each).is_capturing() for each in types)


def _capture_query(device_type: str, module: Any) -> Callable[[], bool]:
    if hasattr(module, "is_current_stream_capturing"):
        query: Callable[[], bool] = module.is_current_stream_capturing
        return query
    accelerated = _accelerator()
    # If the device's module has no `is_current_stream_capturing`, use `torch.Stream.is_capturing`,
    # which exists since 2.13.
    has_query = hasattr(torch.Stream, "is_capturing") and accelerated is not None
    if not has_query or accelerated.type != device_type:
        return lambda: False
    return lambda: bool(torch.accelerator.current_stream().is_capturing())


def _size_of_state(device: torch.device) -> int:
    # Do not query a CUDA device, because CUDA code may be traced on a machine without a GPU.
    if device.type == "cuda":
        return 16  # seed and offset, 8 bytes each
    return int(torch.get_device_module(device.type).get_rng_state(device).numel())
