"""Properties of device types, such as "cuda", which are queried from PyTorch once per type.

No other module of torchop names a device type except "cpu", so torchop works with any accelerator.
A device type's module, such as `torch.cuda`, may lack some of the queried functions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_accelerator: Any = torch._C._accelerator_getAccelerator


class DeviceTraits(NamedTuple):
    """Properties of a device type.

    Attributes:
        type: the name, such as `"cuda"`.
        is_in_use: returns whether the program has initialized the device. Check this before calling
            the others, because they would initialize it.
        is_in_bad_fork: returns whether the device cannot be used, because this process was forked
            after the device had been initialized.
        device_count: returns the number of devices, or 0 if the device is not initialized.
        names: returns the human-readable names of the devices.
        is_capturing: returns whether the current stream is being captured into a graph, in which
            case synchronizing would fail.
        get_rng_state: returns the state of a device's random generator; None if unsupported.
        set_rng_state: sets the state of a device's random generator; None if unsupported.
        size_of_state: returns the size of a generator state in bytes. It may be called during
            capture.
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
    """Return the properties of the process's accelerator, or None if there is none."""
    device = _accelerator()
    return None if device is None else traits(device.type)


def accelerator_type() -> str:
    """Return the type of the process's accelerator, or "cuda" if there is none."""
    found = accelerator()
    return "cuda" if found is None else found.type


def accelerator_count() -> int:
    """Return the number of accelerators, or 0 if the program has not used one yet."""
    found = accelerator()
    return 0 if found is None else found.device_count()


def accelerators(count: int) -> list[torch.device]:
    return [torch.device(_accelerator().type, index) for index in range(count)]


def are_captured(tensors: list[torch.Tensor]) -> bool:
    """Return whether the current stream of any tensor's device is being captured into a graph."""
    types = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
    return any(traits(each).is_capturing() for each in types)


def _capture_query(device_type: str, module: Any) -> Callable[[], bool]:
    if hasattr(module, "is_current_stream_capturing"):
        query: Callable[[], bool] = module.is_current_stream_capturing
        return query
    accelerated = _accelerator()
    # For device modules without this function, use `torch.Stream.is_capturing`, which exists since
    # 2.13.
    has_query = hasattr(torch.Stream, "is_capturing") and accelerated is not None
    if not has_query or accelerated.type != device_type:
        return lambda: False
    return lambda: bool(torch.accelerator.current_stream().is_capturing())


def _size_of_state(device: torch.device) -> int:
    # Do not query a CUDA device, because a program may trace CUDA code on a machine without a GPU.
    if device.type == "cuda":
        return 16  # seed and offset, 8 bytes each
    return int(torch.get_device_module(device.type).get_rng_state(device).numel())
