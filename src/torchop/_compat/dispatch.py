"""Dispatch keys and devices, thread-local dispatcher state, modes, and lookup of kernels."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from torchop._compat.classes import DispatchKey, DispatchKeySet, OpOverload
from torchop._errors import short_errors

AFTER_AUTOGRAD = torch._C._after_autograd_keyset
AFTER_ADINPLACEORVIEW = torch._C._after_ADInplaceOrView_keyset

# A context manager that disables the `__torch_function__` of tensor subclasses.
WithoutTorchFunctions = torch._C.DisableTorchFunctionSubclass

# The keys of tensors with a negative or conjugate bit, in dispatch order.
MATH_BIT_KEYS = ("Negative", "Conjugate")


def below_math_bits(keyset: DispatchKeySet) -> DispatchKeySet:
    """Return the dispatch keys that remain once conjugate and negative bits are resolved."""
    for key in MATH_BIT_KEYS:
        keyset = keyset.remove(_key(key))
    return keyset & AFTER_ADINPLACEORVIEW


# This function also parses the three autocast keys that the Python enum `DispatchKey` lacks.
parse_dispatch_key: Callable[[str], DispatchKey | None] = torch._C._parse_dispatch_key


def _key(name: str) -> DispatchKey:
    key = parse_dispatch_key(name)
    assert key is not None, name
    return key


def autocast_is_available(device_type: str) -> bool:
    """Return whether a device type supports autocast; raise RuntimeError if it is unknown."""
    with short_errors:
        return torch._C._is_autocast_available(device_type)


# The device types that support autocast.
autocast_device_types: Callable[[], list[str]] = torch._C._autocast_supported_devices


def dispatch_key_name(device_type: str) -> str:
    """Return the backend key of a device type, or raise a RuntimeError that lists the types."""
    with short_errors:
        return torch._C._dispatch_key_for_device(device_type)


def device_of_key(key: str) -> str | None:
    """Return the device type of a backend key, or None for other keys."""
    if key == "PrivateUse1":
        return torch._C._get_privateuse1_backend_name()
    device_type = key.lower()
    try:
        return device_type if torch._C._dispatch_key_for_device(device_type) == key else None
    except RuntimeError:
        return None


def format_key(key: str) -> str:
    """Format a key for messages, with its device type if the key's name does not show that."""
    device_type = device_of_key(key)
    return key if device_type in (None, key.lower()) else f"{key} ({device_type})"


def kernel_key(kind: str) -> str:
    """Return a kernel's dispatch key, given a device type, `"default"` or the name of a key."""
    if kind == "default":
        return "CompositeExplicitAutograd"
    return kind if parse_dispatch_key(kind) is not None else dispatch_key_name(kind)


def redispatch(
    overload: OpOverload, keyset: DispatchKeySet, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call an operator's kernel for the first of these keys.

    `OpOverload.redispatch` would fail for operators with an argument named `keyset`.
    """
    return overload._handle.redispatch_boxed(keyset, *args, **kwargs)


def backend_keyset(device_type: str) -> DispatchKeySet:
    """Return the key set for a redispatch to the kernel of one backend."""
    return DispatchKeySet(_key(dispatch_key_name(device_type)))


# A context manager that disables the `__torch_function__` of subclasses and of modes.
plain_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def device(name: str | torch.device) -> torch.device:
    """Return the device with this name, without calling the user's function modes."""
    with torch._C.DisableTorchFunction():
        return torch.device(name)


def function_modes_are_active() -> bool:
    """Return whether a TorchFunctionMode is active, such as a `torch.device` context."""
    return torch._C._len_torch_function_stack() > 0


def default_device() -> str:
    """Return the name of this thread's default device, or "" for the CPU."""
    modes = _get_current_function_mode_stack() if function_modes_are_active() else []
    names = [str(mode.device) for mode in modes if isinstance(mode, DeviceContext)]
    return "" if names[-1:] in ([], ["cpu"]) else names[-1]


def dispatch_modes_are_active() -> bool:
    return torch._C._len_torch_dispatch_stack() > 0


_NO_KEYS = DispatchKeySet(DispatchKey.Undefined)


def without_keys(*names: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context manager that excludes dispatch keys in this thread."""
    keyset = _NO_KEYS
    for name in names:
        keyset = keyset.add(_key(name))
    return torch._C._ExcludeDispatchKeyGuard(keyset)


def with_overlooked_keys(
    qualname: str, tensors: Iterable[torch.Tensor], keyset: DispatchKeySet = _NO_KEYS
) -> DispatchKeySet:
    """Return the keys for a redispatch from BackendSelect or from a mode's handler.

    Args:
        qualname: the operator.
        tensors: the tensors that the dispatcher did not inspect, such as those in a `Tensor?[]`.
        keyset: the keys of the dispatcher; empty in a mode.
    """
    # Remove ADInplaceOrView: all calls include it, so the kernel there has already run.
    overlooked = _with_keys_of(tensors, _NO_KEYS).remove(DispatchKey.ADInplaceOrView)
    keyset = (keyset | overlooked) - torch._C._dispatch_tls_local_exclude_set()
    keyset = keyset.remove(DispatchKey.BackendSelect)
    # Remove keys with fallthroughs, because a redispatch does not skip these: only the first
    # dispatch masks them, in ATen/core/dispatch/DispatchKeyExtractor.h.
    for key, name in in_order(keyset):
        registered = registered_key(qualname, name)
        if registered is not None:
            passes = falls_through(qualname, registered)
        else:  # PyTorch's backend fallback for autocast is a fallthrough
            passes = name.startswith("Autocast")
        if passes:
            keyset = keyset.remove(key)
    return keyset


def registered_key(qualname: str, key: str) -> str | None:
    """Return the key at which the operator's kernel or fallthrough for `key` was registered."""
    # A registration at the alias key Autograd applies to all autograd keys without a kernel.
    for name in (key, "Autograd") if key.startswith("Autograd") else (key,):
        if has_kernel(qualname, name):
            return name
    return None


def in_order(keyset: DispatchKeySet) -> Iterator[tuple[DispatchKey, str]]:
    """Yield the keys of a set with their names, in dispatch order."""
    while (key := keyset.highestPriorityTypeId()) != DispatchKey.Undefined:
        yield key, torch._C._dispatch_key_name(key)
        keyset = keyset.remove(key)


def has_kernel(qualname: str, key: str) -> bool:
    """Return whether an operator has a kernel registered at exactly this key.

    `parseDispatchKey` (c10/core/DispatchKey.cpp) lacks some keys, such as AutogradMTIA. Python code
    cannot register kernels for these.
    """
    is_readable = parse_dispatch_key(key) is not None
    return is_readable and torch._C._dispatch_has_kernel_for_dispatch_key(qualname, key)


# `falls_through` returns whether an operator has a fallthrough at a key. `computed_kernel` returns
# the kernel that the dispatcher runs for a key, which may be a backend fallback.
falls_through: Callable[[str, str], bool] = (
    torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough
)
computed_kernel: Callable[[str, str], Any] = torch._C._dispatch_get_computed_kernel_for_dispatch_key


def keyset_of_call(tensors: Iterable[torch.Tensor]) -> DispatchKeySet:
    keyset = _with_keys_of(tensors, torch._C._dispatch_tls_local_include_set())
    return keyset - torch._C._dispatch_tls_local_exclude_set()


def _with_keys_of(tensors: Iterable[torch.Tensor], keyset: DispatchKeySet) -> DispatchKeySet:
    for tensor in tensors:
        keyset = keyset | torch._C._dispatch_keys(tensor)
    return keyset


def from_backend(keyset: DispatchKeySet) -> DispatchKeySet:
    """Return a call's backend key, and the keys that the dispatcher handles after it."""
    for key, _ in in_order(keyset):
        if torch._C._dispatch_is_included_in_alias(key, DispatchKey.CompositeExplicitAutograd):
            break
        keyset = keyset.remove(key)
    return keyset


def first_key(keyset: DispatchKeySet) -> str:
    """Return the key that the dispatcher looks up first."""
    return torch._C._dispatch_key_name(keyset.highestPriorityTypeId())


def has_backend_fallback(keyset: DispatchKeySet) -> bool:
    key = keyset.highestPriorityTypeId()
    return key != DispatchKey.Undefined and torch._C._dispatch_has_backend_fallback(key)


def keys_of_every_device(qualname: str) -> list[str]:
    """Return the keys for which the dispatcher runs the CompositeExplicitAutograd kernel.

    Excludes keys for which Python code cannot register a kernel.
    """
    return [
        key
        for key, text in kernel_table(qualname).items()
        # A registration at Undefined, the key of calls without tensors, would apply to all keys.
        if "[default backend kernel]" in text and key != "Undefined" and parse_dispatch_key(key)
    ]


def keys_of_call(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the names of the dispatch keys of a call, in dispatch order."""
    return [name for _, name in in_order(keyset_of_call(tensors))]


def kernel_table(qualname: str) -> dict[str, str]:
    """Return the registration site of an operator's kernel at each key, without fallthroughs."""
    lines = torch._C._dispatch_dump_table(qualname).splitlines()
    pairs = (line.partition(": ") for line in lines)
    return {key: text for key, _, text in pairs if not text.startswith("fallthrough")}


# The keys that torch.func and torch.export need. They are excluded while a TorchDispatchMode
# handles a call: see pythonFallback in aten/src/ATen/core/PythonFallbackKernel.cpp.
_TRANSFORM_KEYS = (
    DispatchKey.PythonTLSSnapshot,
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchVmapMode,
    DispatchKey.FuncTorchGradWrapper,
    DispatchKey.Functionalize,
    DispatchKey.PreDispatch,
)
_TRANSFORMS = functools.reduce(DispatchKeySet.__or__, map(DispatchKeySet, _TRANSFORM_KEYS))


def is_handled_by_mode() -> bool:
    """Return whether a TorchDispatchMode's handler called the running kernel.

    Returns False below a torch.func transform. Its interpreter excludes the same keys on purpose,
    and including them would enter the transform again (see saveLocalDispatchKeySet in
    ATen/functorch/Interpreter.h).
    """
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.PythonTLSSnapshot)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def with_transforms() -> Any:
    """Return a context manager that lets a kernel called by a mode use torch.func and torch.export.

    Otherwise such kernels would fail in the first call to a compiled function, which runs in an
    `_AnalyzeCustomOpInputOutputMode` (torch/_functorch/_aot_autograd/runtime_wrappers.py).
    """
    excluded = torch._C._dispatch_tls_local_exclude_set() - _TRANSFORMS
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
