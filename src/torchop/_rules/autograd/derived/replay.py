"""Running the body of an operator a second time in the ambient state of its first run.

These are the states of PyTorch's random number generators, autocast, the default dtype and the
default device. They are packed into one tensor of bytes, so that they can be saved for a backward,
and in a compiled graph be a result of one operator and an argument of another.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import devices, dispatch, schemas
from torchop._compat.classes import Tag, TorchDispatchMode
from torchop._compat.settings import changed
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._core.generators import Generator, devices_of, generators_of
from torchop._errors import GradientError

Result = TypeVar("Result")

# A packed state holds the index of a dtype; the first is that of a state that nobody changed. They
# are sorted because another process may run the graph, in which a set has another order.
_DTYPES = (torch.float32, *sorted({*schemas.dtypes().values()} - {torch.float32}, key=str))
_LENGTH = struct.Struct("<I")
# How many devices of the accelerator there are states of, the default dtype, the default device.
# After these come autocast and its dtype for each type of device. `ambient_state.cpp` writes the
# same bytes of a plain state.
_SETTINGS = struct.Struct("<BB24s")
_PLAIN = _SETTINGS.pack(0, 0, b"")
_UNREADABLE = b"\0"  # in place of a state; others begin with another byte


class AmbientState(NamedTuple):
    """The ambient state of a body that runs now."""

    packed: Tensor
    # Whether autocast is off, and the defaults are those of a new process.
    are_plain: bool = True
    # Whether the state of a generator cannot be read, because a graph is captured on its device.
    are_captured: bool = False


# The last one; calls between which nobody draws share it.
_latest: AmbientState | None = None


def ambient_state(values: Sequence[Any], *, in_graph: bool = False) -> AmbientState:
    """The ambient state of a body that is called now, with these arguments.

    They have the states of the generators of all devices. In a graph, only those of the arguments'
    devices, because the number of bytes must be known when the graph is made.
    """
    global _latest
    state, count = _latest, 0 if in_graph else devices.accelerator_count()
    packed = _packed_if_plain(values, state and state.packed, count)
    if packed is None:
        state = _latest = _of_all_devices(values, count, in_graph)
    elif state is None or packed is not state.packed:
        state = _latest = AmbientState(packed)
    return state


def _of_all_devices(values: Sequence[Any], count: int, in_graph: bool) -> AmbientState:
    states = [_read(generator) for generator in generators_of(values, count)]
    if in_graph:
        sizes = (1 + generator.size() for generator in generators_of(values))
        states = [state.ljust(size, b"\0") for state, size in zip(states, sizes, strict=True)]
    autocast = bytearray()
    for device_type in _device_types(values, count):
        is_on = _autocasts(device_type)
        autocast += bytes((is_on, is_on and _DTYPES.index(torch.get_autocast_dtype(device_type))))
    dtype = _DTYPES.index(torch.get_default_dtype())
    settings = _SETTINGS.pack(count, dtype, dispatch.default_device().encode()) + autocast
    packed = _shared(_pack((*states, settings)), _latest and _latest.packed)
    are_captured = any(state[:1] == _UNREADABLE for state in states)
    return AmbientState(packed, not any(settings[1:]), are_captured)


def _read(generator: Generator) -> bytes:
    """The state of a generator, after a byte that says whether it could be read."""
    try:
        return b"\1" + _bytes(generator.get())
    except RuntimeError:  # a CUDA graph is captured
        return _UNREADABLE


def have_changed(state: AmbientState, values: Sequence[Any]) -> bool:
    """Whether the state has changed since, as when the body drew random numbers."""
    return _bytes(state.packed) != _bytes(ambient_state(values).packed)


def _packed_if_plain(values: Sequence[Any], latest: Tensor | None, count: int) -> Tensor | None:
    """Return the state of a call packed if it is plain; `latest` if it is the same; or None.

    It is plain if the arguments certainly hold no generator, and no device but the CPU and the
    `count` accelerators. The state is read in every call that records a gradient, so this is done
    in C++. Otherwise the states are read one by one.
    """
    accelerator = devices.accelerator() if count else None
    if accelerator is not None and accelerator.get_rng_state is None:
        return None  # PyTorch may have states that cannot be restored
    packed: Tensor | None = _hooks.extension.pack_plain(values, latest, count)
    return packed


def _shared(packed: Tensor, latest: Tensor | None) -> Tensor:
    return packed if latest is None or _bytes(packed) != _bytes(latest) else latest


def _pack(parts: Sequence[bytes | bytearray]) -> Tensor:
    """The states of the generators, and then the settings, as a tensor of bytes."""
    packed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def packed_size(values: Sequence[Any]) -> int:
    """The number of bytes that a graph packs of a call with these arguments, which may be fake."""
    sizes = [1 + generator.size() for generator in generators_of(values)]
    sizes.append(_SETTINGS.size + 2 * len(_device_types(values, 0)))
    return sum(size + _LENGTH.size for size in sizes)


def replayed(
    definition: Definition, packed: Tensor | None, values: Sequence[Any], run: Callable[[], Result]
) -> Result:
    """What `run` returns, the body of an operator, in the ambient state of a call of it.

    An empty tensor stands for those of a body that ran without autocast and draws no random
    numbers, and None for such ones of which more is not known.
    """
    count = devices.accelerator_count()
    if (
        type(packed) is Tensor
        and _is_readable(packed)
        and _packed_if_plain(values, packed, count) is packed
    ):
        # The present state is that of the call, so only what the body draws has to be put back.
        try:
            return run()
        finally:
            if _packed_if_plain(values, packed, count) is not packed:
                _put(generators_of(values, count), _unpack(packed)[0])
    states, settings = _unpack(packed)
    count, dtype, device = _SETTINGS.unpack_from(settings)
    with repeatable(definition, ambient_state(values)), contextlib.ExitStack() as blocks:
        if packed is not None:
            if (of_run := _DTYPES[dtype]) is not (default := torch.get_default_dtype()):
                blocks.enter_context(changed(torch.set_default_dtype, of_run, default))
            if (name := device.rstrip(b"\0").decode()) != dispatch.default_device():
                blocks.enter_context(dispatch.device(name or "cpu"))
        device_types = _device_types(values, count)
        autocast = settings[_SETTINGS.size :] or bytes(2 * len(device_types))
        for device_type, enabled, of_autocast in zip(
            device_types, autocast[::2], autocast[1::2], strict=True
        ):
            if enabled or _autocasts(device_type):
                _set_autocast(blocks, device_type, bool(enabled), _DTYPES[of_autocast])
        generators = [*generators_of(values, count)] if states else []
        put = functools.partial(_put, generators)
        blocks.enter_context(changed(put, states, [*map(_read, generators)]))
        return run()


def _put(generators: Iterable[Generator], states: Sequence[bytes]) -> None:
    for generator, state in zip(generators, states, strict=True):
        # A generator that nobody drew from is left alone, because other threads may use it.
        if state[0] and state != (now := _read(generator)) and now[0]:
            generator.set(torch.frombuffer(bytearray(state[1:]), dtype=torch.uint8))


def _set_autocast(
    blocks: contextlib.ExitStack, device_type: str, enabled: bool, dtype: torch.dtype
) -> None:
    def change(setter: Callable[[Any], object], value: object, before: object) -> None:
        blocks.enter_context(changed(setter, value, before))

    # The cache of autocast would keep casts of tensors that only this call uses.
    change(torch.set_autocast_cache_enabled, False, torch.is_autocast_cache_enabled())
    if enabled:
        of_device = functools.partial(torch.set_autocast_dtype, device_type)
        change(of_device, dtype, torch.get_autocast_dtype(device_type))
    of_device = functools.partial(torch.set_autocast_enabled, device_type)
    change(of_device, enabled, torch.is_autocast_enabled(device_type))


def _device_types(values: Sequence[Any], count: int) -> list[str]:
    types = {"cpu", *(device.type for device in devices_of(values))} - {"meta"}
    return sorted(types | {device.type for device in devices.accelerators(count)})


def _autocasts(device_type: str) -> bool:
    return dispatch.autocast_is_available(device_type) and torch.is_autocast_enabled(device_type)


def _bytes(state: Tensor) -> bytes:
    # No operator of PyTorch: the modes and transforms around the call would intercept it.
    return ctypes.string_at(state.data_ptr(), state.numel())


def _is_readable(packed: Tensor) -> bool:
    return packed.is_cpu and packed.is_contiguous()


def _unpack(packed: Tensor | None) -> tuple[Sequence[bytes], bytes]:
    if packed is None or not packed.numel():
        return (), _PLAIN
    # An operator of PyTorch would return a tensor without data inside of a transform.
    data = _bytes(packed if _is_readable(packed) else packed.cpu().contiguous())
    parts, position = [], 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        parts.append(data[position : position + length])
        position += length
    return parts[:-1], parts[-1]


# --------------------------------------------------------------------------------------------------
# Random numbers that could not be drawn again

_WHILE_CAPTURED = (
    "A graph is captured on the device, so the state of its generator can be neither read nor set. "
    "Pass the random numbers as an argument, or call it outside of the capture."
)
# The namespaces of operators that are not looked into: a tag says which of them draw.
_OF_PYTORCH = frozenset({"aten", "prim", "prims"})


def repeatable(
    definition: Definition, state: AmbientState
) -> contextlib.AbstractContextManager[object]:
    """A block that may draw no random numbers while a graph is captured."""
    may_draw = not state.are_captured
    return contextlib.nullcontext() if may_draw else RefusingDraws(definition, _WHILE_CAPTURED)


class RefusingDraws(TorchDispatchMode):
    """Refuses random numbers in the body of an operator, and says why the backward needs them."""

    def __init__(self, definition: Definition, why: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # it has no annotations
        self._definition = definition
        self._why = why

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if Tag.nondeterministic_seeded in func.tags:
            # One that consists of others may draw in some calls only, as dropout in training does.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            raise GradientError(
                f"{self._definition}: its body draws random numbers in {func}, which its derived "
                f"formula would have to draw again. {self._why}"
            )
        tensors = list(tensors_in((*args, *kwargs.values())))
        if func.namespace in _OF_PYTORCH or not tensors:
            return func(*args, **kwargs)
        # The kernel may be Python again. A call would come back here.
        keyset = dispatch.with_overlooked_keys(func.name(), tensors)
        with self:
            return dispatch.redispatch(func, keyset, args, kwargs)
