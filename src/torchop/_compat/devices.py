"""What is asked of a type of device, whichever it is: one table, made of what PyTorch says of it.

No code names a type of device to know what to do for it, but for the CPU, which is always there.
PyTorch's module of a type, such as `torch.cuda`, may lack some functions, and older releases know
some things of few types.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

_accelerator: Any = torch._C._accelerator_getAccelerator


class DeviceTraits(NamedTuple):
    """A type of device.

    Attributes:
        type: its name, such as `"cuda"`.
        is_in_use: whether the program has used it; to ask one more than that would start it.
        is_in_bad_fork: whether this process was forked from one that used it, so that it cannot.
        device_count: how many there are; 0 until it is in use.
        names: those of the devices, for people.
        is_capturing: whether the current stream is captured into a graph, so that nothing may wait.
        get_rng_state: the state of a device's generator; None if that cannot be asked for.
        set_rng_state: sets it.
        size_of_state: the number of bytes of it, also while a graph is captured.
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
    """The line of the table for a type that may have data, so for any but "meta"."""
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
        _asks_for_capture(device_type, module),
        getattr(module, "get_rng_state", None),
        getattr(module, "set_rng_state", None),
        functools.cache(_size_of_state),
    )


def accelerator() -> DeviceTraits | None:
    """The one type of device that this process has beside the CPU; None if it has none."""
    device = _accelerator()
    return None if device is None else traits(device.type)


def accelerator_type() -> str:
    """Its type; without one, "cuda", for which most operators have kernels."""
    found = accelerator()
    return "cuda" if found is None else found.type


def accelerator_count() -> int:
    """The number of accelerators; 0 without one, and until the program has used it."""
    found = accelerator()
    return 0 if found is None else found.device_count()


def accelerators(count: int) -> list[torch.device]:
    """The first `count` of the accelerators."""
    return [torch.device(_accelerator().type, index) for index in range(count)]


def are_captured(tensors: list[torch.Tensor]) -> bool:
    """Whether work on one of these tensors would be captured into a graph now."""
    types = {tensor.device.type for tensor in tensors} - {"cpu", "meta"}
    return any(traits(each).is_capturing() for each in types)


def _asks_for_capture(device_type: str, module: Any) -> Callable[[], bool]:
    if hasattr(module, "is_current_stream_capturing"):
        asks: Callable[[], bool] = module.is_current_stream_capturing
        return asks
    accelerated = _accelerator()
    # Since 2.13, any stream can be asked.
    is_asked = hasattr(torch.Stream, "is_capturing") and accelerated is not None
    if not is_asked or accelerated.type != device_type:
        return lambda: False
    return lambda: bool(torch.accelerator.current_stream().is_capturing())


def _size_of_state(device: torch.device) -> int:
    if device.type == "cuda":  # a program may be traced for CUDA without such a device
        return 16  # the seed and the offset
    return int(torch.get_device_module(device.type).get_rng_state(device).numel())
