"""Run an operator's body again in the ambient state of its first run.

The ambient state consists of the states of the random number generators, the autocast settings, the
default dtype and the default device. The whole state is packed into one byte tensor, because both
autograd and compiled graphs pass tensors from the forward pass to the backward pass.
"""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import autocasting, devices, dispatch, schemas
from torchop._compat.classes import Tag, TorchDispatchMode
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._core.generators import Generator, devices_of, generators_of
from torchop._errors import GradientError

Result = TypeVar("Result")

# In packed states, a dtype is an index into this tuple. Index 0 is float32, PyTorch's initial
# default dtype. The rest is sorted, because the order must be the same in all processes that run a
# cached graph.
_DTYPES = (torch.float32, *sorted({*schemas.dtypes().values()} - {torch.float32}, key=str))
_LENGTH = struct.Struct("<I")
# The packed settings start with three fields: the number of accelerators whose generator states are
# packed, the default dtype, and the default device. Two bytes for each device type follow: whether
# autocast is enabled, and the autocast dtype. `ambient_state.cpp` writes the same format if all
# settings are PyTorch's initial ones.
_SETTINGS = struct.Struct("<BB24s")
_PLAIN = _SETTINGS.pack(0, 0, b"")
# This byte replaces the state of a generator that cannot be read. The packed states of all other
# generators start with a byte of 1.
_UNREADABLE = b"\0"


class AmbientState(NamedTuple):
    """The generator states and settings during a call, packed into a byte tensor.

    If `is_plain` is true, autocast is disabled, and the default dtype and device are PyTorch's
    initial ones. If `is_captured` is true, a CUDA graph was being captured, so the state of a
    generator could not be read.
    """

    packed: Tensor
    is_plain: bool = True
    is_captured: bool = False


# The ambient state (generator states and settings) of the latest call. Later calls reuse it until
# random numbers are drawn or a setting changes.
_latest: AmbientState | None = None


def ambient_state(values: Sequence[Any], *, in_graph: bool = False) -> AmbientState:
    """Return the current generator states and settings, for a call with arguments `values`.

    The result includes the generators of all devices. If `in_graph` is true, it includes only the
    generators of the arguments' devices, so its size is known during tracing.
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
        is_on = autocasting.is_enabled_for(device_type)
        autocast += bytes((is_on, is_on and _DTYPES.index(torch.get_autocast_dtype(device_type))))
    dtype = _DTYPES.index(torch.get_default_dtype())
    settings = _SETTINGS.pack(count, dtype, dispatch.default_device().encode()) + autocast
    packed = _shared(_pack((*states, settings)), _latest and _latest.packed)
    is_captured = any(state[:1] == _UNREADABLE for state in states)
    return AmbientState(packed, not any(settings[1:]), is_captured)


def _read(generator: Generator) -> bytes:
    """Return a byte of 1 followed by the generator's state. If that fails, return `_UNREADABLE`."""
    try:
        return b"\1" + _bytes(generator.get())
    except RuntimeError:  # a CUDA graph is being captured
        return _UNREADABLE


def has_changed(state: AmbientState, values: Sequence[Any]) -> bool:
    return _bytes(state.packed) != _bytes(ambient_state(values).packed)


def _packed_if_plain(values: Sequence[Any], latest: Tensor | None, count: int) -> Tensor | None:
    """Return the current ambient state, packed by fast C++ code, or None if C++ cannot read it.

    Speed matters, because every call that records a gradient packs the state. The C++ code requires
    that all settings are PyTorch's initial ones, that no argument is a generator, and that all
    arguments are on the CPU or on one of the first `count` accelerators. If the state equals
    `latest`, return `latest` itself.
    """
    accelerator = devices.accelerator() if count else None
    if accelerator is not None and accelerator.get_rng_state is None:
        return None  # C++ cannot read the generators of this backend
    packed: Tensor | None = _hooks.extension.pack_plain(values, latest, count)
    return packed


def _shared(packed: Tensor, latest: Tensor | None) -> Tensor:
    return packed if latest is None or _bytes(packed) != _bytes(latest) else latest


def _pack(parts: Sequence[bytes | bytearray]) -> Tensor:
    packed = b"".join(_LENGTH.pack(len(part)) + part for part in parts)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8)


def packed_size(values: Sequence[Any]) -> int:
    sizes = [1 + generator.size() for generator in generators_of(values)]
    sizes.append(_SETTINGS.size + 2 * len(_device_types(values, 0)))
    return sum(size + _LENGTH.size for size in sizes)


def replayed(
    definition: Definition, packed: Tensor | None, values: Sequence[Any], run: Callable[[], Result]
) -> Result:
    """Call `run` with saved generator states and settings, and restore the current ones afterwards.

    If `packed` is None or empty, no state was saved, and `run` is called without autocast.
    """
    count = devices.accelerator_count()
    if (
        type(packed) is Tensor
        and _is_readable(packed)
        and _packed_if_plain(values, packed, count) is packed
    ):
        # The current generator states and settings equal the saved ones, so nothing needs to be set
        # before `run`. If `run` draws random numbers, the generators must be restored afterwards.
        try:
            return run()
        finally:
            if _packed_if_plain(values, packed, count) is not packed:
                _restore(generators_of(values, count), _unpack(packed)[0])
    states, settings = _unpack(packed)
    count, dtype, device = _SETTINGS.unpack_from(settings)
    with capture_guard(definition, ambient_state(values)), contextlib.ExitStack() as blocks:
        if packed is not None:
            if (of_run := _DTYPES[dtype]) is not (default := torch.get_default_dtype()):
                blocks.callback(torch.set_default_dtype, default)
                torch.set_default_dtype(of_run)
            if (name := device.rstrip(b"\0").decode()) != dispatch.default_device():
                blocks.enter_context(dispatch.device(name or "cpu"))
        device_types = _device_types(values, count)
        autocast = settings[_SETTINGS.size :] or bytes(2 * len(device_types))
        others = (each for each in autocasting.state() if each[0] not in device_types)
        saved = zip(device_types, autocast[::2], autocast[1::2], strict=True)
        enabled = ((name, _DTYPES[dtype]) for name, is_on, dtype in saved if is_on)
        if (wanted := (*others, *enabled)) or autocasting.is_enabled():
            blocks.enter_context(autocasting.restored(wanted))
        generators = [*generators_of(values, count)] if states else []
        blocks.callback(_restore, generators, [*map(_read, generators)])
        _restore(generators, states)
        return run()


def _restore(generators: Iterable[Generator], states: Sequence[bytes]) -> None:
    for generator, state in zip(generators, states, strict=True):
        # Do not set a generator that already has this state, because other threads may use it.
        if state[0] and state != (now := _read(generator)) and now[0]:
            generator.set(torch.frombuffer(bytearray(state[1:]), dtype=torch.uint8))


def _device_types(values: Sequence[Any], count: int) -> list[str]:
    types = {"cpu", *(device.type for device in devices_of(values))} - {"meta"}
    return sorted(types | {device.type for device in devices.accelerators(count)})


def _bytes(state: Tensor) -> bytes:
    # Read the memory without PyTorch operators, because modes and transforms would intercept them.
    return ctypes.string_at(state.data_ptr(), state.numel())


def _is_readable(packed: Tensor) -> bool:
    return packed.is_cpu and packed.is_contiguous()


def _unpack(packed: Tensor | None) -> tuple[Sequence[bytes], bytes]:
    if packed is None or not packed.numel():
        return (), _PLAIN
    # Do not use PyTorch operators, because inside a torch.func transform, they may return tensors
    # without data.
    data = _bytes(packed if _is_readable(packed) else packed.cpu().contiguous())
    parts, position = [], 0
    while position < len(data):
        (length,) = _LENGTH.unpack_from(data, position)
        position += _LENGTH.size
        parts.append(data[position : position + length])
        position += length
    return parts[:-1], parts[-1]


# --------------------------------------------------------------------------------------------------
# Reject random numbers that a backward pass could not reproduce

_WHILE_CAPTURED = (
    "A graph is being captured on the device, so the state of the generator can be neither read "
    "nor set. Pass the random numbers as an argument, or call the operator outside of the capture."
)
# All random operators in these namespaces have the tag nondeterministic_seeded, so operators
# without the tag draw no random numbers.
_PYTORCH_NAMESPACES = frozenset({"aten", "prim", "prims"})


def capture_guard(
    definition: Definition, state: AmbientState
) -> contextlib.AbstractContextManager[object]:
    if state.is_captured:
        return ForbidRandomNumbers(definition, _WHILE_CAPTURED)
    return contextlib.nullcontext()


class ForbidRandomNumbers(TorchDispatchMode):
    """Raises GradientError if an operator's body draws random numbers."""

    def __init__(self, definition: Definition, why: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # unannotated in PyTorch
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
            # A composite operator such as `dropout` may draw numbers only in some calls. So check
            # the operators that it calls instead.
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            raise GradientError(
                f"{self._definition}: the body draws random numbers in {func}, and the backward of "
                f"the derived formula must draw the same numbers again. {self._why}"
            )
        tensors = list(tensors_in((*args, *kwargs.values())))
        if func.namespace in _PYTORCH_NAMESPACES or not tensors:
            return func(*args, **kwargs)
        # PyTorch disables this mode while it handles a call, so enable it again to check the
        # operators that the kernel calls.
        keyset = dispatch.with_overlooked_keys(func.name(), tensors)
        with self:
            return dispatch.redispatch(func, keyset, args, kwargs)
