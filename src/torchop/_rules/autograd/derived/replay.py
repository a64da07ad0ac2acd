"""Running the body of an operator again as it ran before: the same random numbers and casts.

What the body finds around it is written into one tensor of bytes, so that it can be saved for a
backward, and be a result of one operator and an argument of another in a compiled graph.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop._compat import dispatch

# The dtypes that autocast can have; their places in here are what is written.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LENGTH = struct.Struct("<I")


class Surroundings(NamedTuple):
    """What a body found around it: states of random number generators, and autocast by device."""

    random: tuple[bytes, ...]
    autocast: bytes

    @property
    def is_plain(self) -> bool:
        return not any(self.autocast[::2])


def surroundings(values: Sequence[Any]) -> Surroundings:
    """What a body that is called with these values would find now."""
    random = tuple(_bytes(source.get()) for source in _sources(values))
    flags = bytearray()
    for device_type in _device_types(values):
        enabled = _autocasts(device_type)
        dtype = torch.get_autocast_dtype(device_type) if enabled else _DTYPES[0]
        flags += bytes((enabled, _DTYPES.index(dtype) if dtype in _DTYPES else 0))
    return Surroundings(random, bytes(flags))


def pack(found: Surroundings) -> Tensor:
    """The surroundings as a tensor of bytes."""
    parts = (*found.random, found.autocast)
    packed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def packed_size(values: Sequence[Any]) -> int:
    """The number of bytes that `pack` needs for a call with these values, which may be fake."""
    sizes = [source.size() for source in _sources(values)] + [2 * len(_device_types(values))]
    return sum(size + _LENGTH.size for size in sizes)


@contextlib.contextmanager
def replayed(packed: Tensor | None, values: Sequence[Any]) -> Iterator[None]:
    """Puts the surroundings back for the body of the `with`, and what was there after it.

    Args:
        packed: what `pack` returned; None if the body draws no random numbers, without autocast.
        values: the arguments of the call.
    """
    found = Surroundings((), b"") if packed is None else _unpack(packed)
    sources = list(_sources(values)) if found.random else []
    flags = found.autocast or bytes(2 * len(_device_types(values)))
    before = [source.get() for source in sources]
    with contextlib.ExitStack() as stack:
        for device_type, enabled, dtype in zip(
            _device_types(values), flags[::2], flags[1::2], strict=True
        ):
            if enabled or _autocasts(device_type):
                # Its cache would hold on to casts of tensors that exist only here.
                stack.enter_context(
                    torch.autocast(
                        device_type,
                        dtype=_DTYPES[dtype] if enabled else None,
                        enabled=bool(enabled),
                        cache_enabled=False,
                    )
                )
        try:
            for source, state in zip(sources, found.random, strict=True):
                source.set(_tensor(state))
            yield
        finally:
            for source, state_before in zip(sources, before, strict=True):
                source.set(state_before)


class _Source(NamedTuple):
    """A generator of random numbers that a body can draw from."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], None]
    size: Callable[[], int]


def _sources(values: Sequence[Any]) -> Iterator[_Source]:
    yield _Source(torch.get_rng_state, _set_cpu_state, lambda: torch.get_rng_state().numel())
    for device in sorted(set(_devices(values)), key=str):
        if device.type not in ("cpu", "meta"):
            module = torch.get_device_module(device.type)
            if hasattr(module, "get_rng_state"):
                yield _of_device(module, device)
    for value in values:
        if isinstance(value, torch.Generator):
            yield _of_generator(value)


def _set_cpu_state(state: Tensor) -> None:
    torch.default_generator.set_state(state)  # torch.set_rng_state is traced by modes


def _of_device(module: Any, device: torch.device) -> _Source:
    def size() -> int:
        # Seed and offset; a machine that traces for CUDA need not have it.
        return 16 if device.type == "cuda" else module.get_rng_state(device).numel()

    return _Source(
        lambda: module.get_rng_state(device),
        lambda state: module.set_rng_state(state, device),
        size,
    )


def _of_generator(generator: torch.Generator) -> _Source:
    def restore(state: Tensor) -> None:
        generator.set_state(state)

    return _Source(generator.get_state, restore, lambda: generator.get_state().numel())


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def _devices(values: Sequence[Any]) -> Iterator[torch.device]:
    yield from (tensor.device for tensor in _tensors(values))
    yield from (value for value in values if isinstance(value, torch.device))


def _device_types(values: Sequence[Any]) -> list[str]:
    return sorted({"cpu", *(device.type for device in _devices(values))} - {"meta"})


def _autocasts(device_type: str) -> bool:
    available = dispatch.autocast_is_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def _bytes(state: Tensor) -> bytes:
    # Not through an operator of PyTorch: modes and transforms around the call would see it.
    return ctypes.string_at(state.data_ptr(), state.numel())


def _tensor(state: bytes) -> Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _unpack(packed: Tensor) -> Surroundings:
    data = _bytes(packed.cpu().contiguous())
    parts = []
    position = 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        parts.append(data[position : position + length])
        position += length
    return Surroundings(tuple(parts[:-1]), parts[-1])
