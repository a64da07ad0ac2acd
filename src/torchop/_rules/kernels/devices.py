"""Parse the `device_types` argument of `register_kernel` and `set_priority`."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, TypeAlias

from torchop._compat import dispatch
from torchop._errors import mistake, short_repr
from torchop._schema.signatures import spell_function

DeviceTypes: TypeAlias = "str | Sequence[str | None] | None"


def device_list(device_types: DeviceTypes) -> list[str | None]:
    if device_types is None:
        return [None]
    try:
        devices: list[Any] = [device_types] if isinstance(device_types, str) else list(device_types)
    except TypeError:
        devices = [device_types]  # the loop below raises
        if inspect.isroutine(device_types):
            raise TypeError(
                "register_kernel takes the device types first. Write @register_kernel('cpu'), or "
                "@register_kernel(None) for every device, in front of "
                f"{spell_function(device_types)}."
            ) from None
    for device in devices:
        if device is not None and not isinstance(device, str):
            raise TypeError(
                f"device_types expects device types as strings, such as 'cpu', or None for all; "
                f"got {short_repr(device)} of type {type(device).__name__}."
            )
    return list(dict.fromkeys(None if device == "default" else device for device in devices))


def known_devices(device_types: DeviceTypes) -> tuple[str | None, ...]:
    """Return the device types as a tuple. Raise RuntimeError if one is unknown to PyTorch."""
    devices = device_list(device_types)
    for device in devices:
        if device is not None:
            device_key(device)
    return tuple(devices)


def device_key(device: str) -> str:
    try:
        return dispatch.dispatch_key_name(device)
    except RuntimeError as error:
        raise mistake(
            f"{short_repr(device)} is not a device type; write one such as 'cpu' or 'cuda', or "
            f"None for every device. {error}",
            RuntimeError,
        ) from None
