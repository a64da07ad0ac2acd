"""Dispatch keys and devices, the state of a thread and its modes, and the kernels at a key."""

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

# Reads a tensor without the `__torch_function__` of its class.
WithoutTorchFunctions = torch._C.DisableTorchFunctionSubclass

# The keys of tensors whose values are not what lies in their memory, in the order of dispatch.
MATH_BIT_KEYS = ("Negative", "Conjugate")


def below_math_bits(keyset: DispatchKeySet) -> DispatchKeySet:
    """The keys that are left of a call once its conjugate and negated views are resolved."""
    for key in MATH_BIT_KEYS:
        keyset = keyset.remove(_key(key))
    return keyset & AFTER_ADINPLACEORVIEW


# Not every key has a name in the class DispatchKey: three of the keys of autocast have none.
parse_dispatch_key: Callable[[str], DispatchKey | None] = torch._C._parse_dispatch_key


def _key(name: str) -> DispatchKey:
    key = parse_dispatch_key(name)
    assert key is not None, name
    return key


def autocast_is_available(device_type: str) -> bool:
    """Whether a device type has autocast; raises RuntimeError for what is none."""
    with short_errors:
        return torch._C._is_autocast_available(device_type)


# The device types that have it.
autocast_device_types: Callable[[], list[str]] = torch._C._autocast_supported_devices


def dispatch_key_name(device_type: str) -> str:
    """The backend key of a device type; raises RuntimeError listing the types PyTorch knows."""
    with short_errors:
        return torch._C._dispatch_key_for_device(device_type)


def device_of_key(key: str) -> str | None:
    """The device type whose backend key this is; None if it is another kind of key."""
    if key == "PrivateUse1":
        return torch._C._get_privateuse1_backend_name()
    device_type = key.lower()
    try:
        return device_type if torch._C._dispatch_key_for_device(device_type) == key else None
    except RuntimeError:
        return None


def spelled_key(key: str) -> str:
    """A key as messages write it: that of a plug-in does not tell for which device it is."""
    device_type = device_of_key(key)
    return key if device_type in (None, key.lower()) else f"{key} ({device_type})"


def kernel_key(kind: str) -> str:
    """The dispatch key of a kernel for a device type, `"default"`, or a key by its own name."""
    if kind == "default":
        return "CompositeExplicitAutograd"
    return kind if parse_dispatch_key(kind) is not None else dispatch_key_name(kind)


def redispatch(
    overload: OpOverload, keyset: DispatchKeySet, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Calls the next kernel, of an operator that may have an argument named keyset."""
    return overload._handle.redispatch_boxed(keyset, *args, **kwargs)


def backend_keyset(device_type: str) -> DispatchKeySet:
    """The key set that redispatches a call to one backend."""
    return DispatchKeySet(_key(dispatch_key_name(device_type)))


# Within it, neither a subclass of Tensor nor a mode sees what functions are called.
plain_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def device(name: str | torch.device) -> torch.device:
    """The device of this name, made where a mode of the user's does not see it."""
    with torch._C.DisableTorchFunction():
        return torch.device(name)


def function_modes_are_active() -> bool:
    """Whether a mode, such as a default device, sees the functions that this thread calls."""
    return torch._C._len_torch_function_stack() > 0


def default_device() -> str:
    """The name of the device on which this thread makes tensors; empty for the CPU."""
    modes = _get_current_function_mode_stack() if function_modes_are_active() else []
    names = [str(mode.device) for mode in modes if isinstance(mode, DeviceContext)]
    return "" if names[-1:] in ([], ["cpu"]) else names[-1]


def dispatch_modes_are_active() -> bool:
    """Whether a mode sees the operators that this thread calls."""
    return torch._C._len_torch_dispatch_stack() > 0


_NO_KEYS = DispatchKeySet(DispatchKey.Undefined)


def without_keys(*names: str) -> contextlib.AbstractContextManager[Any]:
    """Excludes dispatch keys in this thread, as long as the context lasts."""
    keyset = _NO_KEYS
    for name in names:
        keyset = keyset.add(_key(name))
    return torch._C._ExcludeDispatchKeyGuard(keyset)


def with_overlooked_keys(
    qualname: str, tensors: Iterable[torch.Tensor], keyset: DispatchKeySet = _NO_KEYS
) -> DispatchKeySet:
    """The keys with which a call goes on from BackendSelect, or from the handler of a mode.

    `keyset` are the keys that the dispatcher computed, of which a mode gets none, and `tensors`
    those that it did not look at for that.
    """
    # ADInplaceOrView is on for every thread, so its kernel has run by now.
    overlooked = _with_keys_of(tensors, _NO_KEYS).remove(DispatchKey.ADInplaceOrView)
    keyset = (keyset | overlooked) - torch._C._dispatch_tls_local_exclude_set()
    keyset = keyset.remove(DispatchKey.BackendSelect)
    # A redispatch does not skip fallthroughs, as a first dispatch does.
    for key, name in in_order(keyset):
        registered = registered_key(qualname, name)
        if registered is not None:
            passes = falls_through(qualname, registered)
        else:  # PyTorch's fallback for all operators at the keys of autocast falls through
            passes = name.startswith("Autocast")
        if passes:
            keyset = keyset.remove(key)
    return keyset


def registered_key(qualname: str, key: str) -> str | None:
    """Where an operator has a kernel of its own for a key, or a fallthrough."""
    # A kernel at the alias Autograd serves those of these keys that have none of their own.
    for name in (key, "Autograd") if key.startswith("Autograd") else (key,):
        if has_kernel(qualname, name):
            return name
    return None


def in_order(keyset: DispatchKeySet) -> Iterator[tuple[DispatchKey, str]]:
    """The keys of a set, with their names, in the order of dispatch."""
    while (key := keyset.highestPriorityTypeId()) != DispatchKey.Undefined:
        yield key, torch._C._dispatch_key_name(key)
        keyset = keyset.remove(key)


def has_kernel(qualname: str, key: str) -> bool:
    """Whether an operator has a kernel that is registered at exactly this key.

    Nobody can name those keys whose names PyTorch does not read, such as AutogradMTIA.
    """
    is_readable = parse_dispatch_key(key) is not None
    return is_readable and torch._C._dispatch_has_kernel_for_dispatch_key(qualname, key)


# Whether it falls through; and which kernel there is, a fallback for all operators included.
falls_through: Callable[[str, str], bool] = (
    torch._C._dispatch_kernel_for_dispatch_key_is_fallthrough
)
computed_kernel: Callable[[str, str], Any] = torch._C._dispatch_get_computed_kernel_for_dispatch_key


def keyset_of_call(tensors: Iterable[torch.Tensor]) -> DispatchKeySet:
    """The dispatch keys of a call with these tensors in this thread."""
    keyset = _with_keys_of(tensors, torch._C._dispatch_tls_local_include_set())
    return keyset - torch._C._dispatch_tls_local_exclude_set()


def _with_keys_of(tensors: Iterable[torch.Tensor], keyset: DispatchKeySet) -> DispatchKeySet:
    for tensor in tensors:
        keyset = keyset | torch._C._dispatch_keys(tensor)
    return keyset


def from_backend(keyset: DispatchKeySet) -> DispatchKeySet:
    """What is left of the keys of a call when it comes to its backend."""
    for key, _ in in_order(keyset):
        if torch._C._dispatch_is_included_in_alias(key, DispatchKey.CompositeExplicitAutograd):
            break
        keyset = keyset.remove(key)
    return keyset


def first_key(keyset: DispatchKeySet) -> str:
    """The key at which the dispatcher looks first."""
    return torch._C._dispatch_key_name(keyset.highestPriorityTypeId())


def has_backend_fallback(keyset: DispatchKeySet) -> bool:
    """Whether the first key of a set has a fallback for all operators."""
    key = keyset.highestPriorityTypeId()
    return key != DispatchKey.Undefined and torch._C._dispatch_has_backend_fallback(key)


def keys_of_every_device(qualname: str) -> list[str]:
    """The keys at which a kernel for every device runs, as far as Python can register there."""
    return [
        key
        for key, text in kernel_table(qualname).items()
        # Undefined, which is for calls without tensors, would stand for all keys there.
        if "[default backend kernel]" in text and key != "Undefined" and parse_dispatch_key(key)
    ]


def keys_of_call(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The names of these keys, in the order of dispatch."""
    return [name for _, name in in_order(keyset_of_call(tensors))]


def kernel_table(qualname: str) -> dict[str, str]:
    """What the dispatcher runs at each key that it does not pass over: where it was registered."""
    lines = torch._C._dispatch_dump_table(qualname).splitlines()
    pairs = (line.partition(": ") for line in lines)
    return {key: text for key, _, text in pairs if not text.startswith("fallthrough")}


# The keys that a TorchDispatchMode excludes while it handles a call, and that torch.func and
# torch.export need: see pythonFallback in aten/src/ATen/core/PythonFallbackKernel.cpp.
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
    """Whether a TorchDispatchMode made the call that this thread is dispatching.

    False below a transform of torch.func, whose interpreter excludes these keys on purpose.
    Including them would enter it again: see saveLocalDispatchKeySet, ATen/functorch/Interpreter.h.
    """
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.PythonTLSSnapshot)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def with_transforms() -> Any:
    """Let a kernel use torch.func and torch.export although a mode handles its call, in a block.

    Otherwise the kernel would fail in the first call of a compiled function, in which
    _AnalyzeCustomOpInputOutputMode of torch/_functorch/_aot_autograd/runtime_wrappers.py is active.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set() - _TRANSFORMS
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
