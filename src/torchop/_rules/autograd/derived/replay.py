"""Running the body of an operator a second time with the same random numbers and autocast.

The states of the random number generators and of autocast are packed into one tensor of bytes. So
they can be saved for a backward, and in a compiled graph be a result of one operator and an
argument of another.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchop._compat import dispatch
from torchop._compat.settings import Setting, run_with
from torchop._core.generators import devices_of, generators_of

Result = TypeVar("Result")

# The dtypes that autocast can have; a packed state holds the index of one.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LENGTH = struct.Struct("<I")
_NO_AUTOCAST = bytes((False, 0))
# Types of arguments that hold no tensors, devices or generators.
_WITHOUT_DEVICE = frozenset({int, float, bool, str, complex, type(None), torch.dtype})


class Surroundings(NamedTuple):
    """The states on which a body depends: of random number generators, of autocast by device."""

    packed: Tensor
    autocast_is_off: bool


def current_surroundings(values: Sequence[Any]) -> Surroundings:
    """The surroundings of a body that is called now, with these arguments."""
    packed = pack_on_cpu(values)
    if packed is not None:
        return Surroundings(packed, True)
    random = tuple(_bytes(generator.get()) for generator in generators_of(values))
    flags = bytearray()
    for device_type in _device_types(values):
        flags += _flags(device_type) if _autocasts(device_type) else _NO_AUTOCAST
    return Surroundings(_pack((*random, flags)), not any(flags[::2]))


def have_changed(surroundings: Surroundings, values: Sequence[Any]) -> bool:
    """Whether the surroundings have changed since, as when the body drew random numbers."""
    return _bytes(surroundings.packed) != _bytes(current_surroundings(values).packed)


def _pack_on_cpu(values: Sequence[Any]) -> Tensor | None:
    if not _are_on_cpu(values) or torch.is_autocast_enabled("cpu"):
        return None
    return _pack((_bytes(torch.default_generator.get_state()), _NO_AUTOCAST))


# Packs the surroundings of a call if autocast is off and its arguments certainly hold no generator
# and no device but the CPU; otherwise returns None. It runs in every call that records a gradient,
# so the native call path puts a function in C++ here.
pack_on_cpu: Callable[[Sequence[Any]], Tensor | None] = _pack_on_cpu


def _flags(device_type: str) -> bytes:
    dtype = torch.get_autocast_dtype(device_type)
    return bytes((True, _DTYPES.index(dtype) if dtype in _DTYPES else 0))


def _are_on_cpu(values: Sequence[Any]) -> bool:
    """Whether the arguments certainly hold no generator and no device but the CPU."""
    return all(
        value.is_cpu if isinstance(value, Tensor) else type(value) in _WITHOUT_DEVICE
        for value in values
    )


def _pack(parts: Sequence[bytes | bytearray]) -> Tensor:
    """The states of the generators, and the flags of autocast, as a tensor of bytes."""
    packed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def packed_size(values: Sequence[Any]) -> int:
    """The number of bytes that are packed of a call with these arguments, which may be fake."""
    sizes = [generator.size() for generator in generators_of(values)]
    sizes.append(2 * len(_device_types(values)))
    return sum(size + _LENGTH.size for size in sizes)


def replayed(packed: Tensor | None, values: Sequence[Any], run: Callable[[], Result]) -> Result:
    """What `run` returns in the surroundings of a call with these arguments.

    None stands for those of a body that ran without autocast and draws no random numbers.
    """
    random, flags = ((), b"") if packed is None else _unpack(packed)
    flags = flags or bytes(2 * len(_device_types(values)))
    settings: list[Setting] = []
    for device_type, enabled, dtype in zip(
        _device_types(values), flags[::2], flags[1::2], strict=True
    ):
        if enabled or _autocasts(device_type):
            settings += _autocast_settings(device_type, bool(enabled), _DTYPES[dtype])
    generators = generators_of(values) if random else ()
    settings += [
        Setting(generator.set, _tensor(state), generator.get())
        for generator, state in zip(generators, random, strict=True)
    ]
    return run_with(settings, run)


def _autocast_settings(device_type: str, enabled: bool, dtype: torch.dtype) -> Iterator[Setting]:
    # The cache of autocast would keep casts of tensors that only this call uses.
    yield Setting(torch.set_autocast_cache_enabled, False, torch.is_autocast_cache_enabled())
    if enabled:
        change = functools.partial(torch.set_autocast_dtype, device_type)
        yield Setting(change, dtype, torch.get_autocast_dtype(device_type))
    change = functools.partial(torch.set_autocast_enabled, device_type)
    yield Setting(change, enabled, torch.is_autocast_enabled(device_type))


def _device_types(values: Sequence[Any]) -> list[str]:
    return sorted({"cpu", *(device.type for device in devices_of(values))} - {"meta"})


def _autocasts(device_type: str) -> bool:
    available = dispatch.autocast_is_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def _bytes(state: Tensor) -> bytes:
    # No operator of PyTorch: the modes and transforms around the call would intercept it.
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _unpack(packed: Tensor) -> tuple[Sequence[bytes], bytes]:
    # An operator of PyTorch would return a tensor without data inside of a transform.
    is_readable = packed.is_cpu and packed.is_contiguous()
    data = _bytes(packed if is_readable else packed.cpu().contiguous())
    parts = []
    position = 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        parts.append(data[position : position + length])
        position += length
    return parts[:-1], parts[-1]
