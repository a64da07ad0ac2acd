"""Access the dispatcher: its keys, devices, thread-local state, modes and table of kernels."""

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

# The dispatch keys of tensors with a lazy negation or conjugation, in dispatch order.
MATH_BIT_KEYS = ("Negative", "Conjugate")


def below_math_bits(keyset: DispatchKeySet) -> DispatchKeySet:
    """Return the keys of `keyset` that are below autograd, without the keys in `MATH_BIT_KEYS`."""
    for key in MATH_BIT_KEYS:
        keyset = keyset.remove(_key(key))
    return keyset & AFTER_ADINPLACEORVIEW


# Parses the name of a dispatch key. Unlike the Python enum `DispatchKey`, it supports the autocast
# keys of all devices.
parse_dispatch_key: Callable[[str], DispatchKey | None] = torch._C._parse_dispatch_key


def _key(name: str) -> DispatchKey:
    key = parse_dispatch_key(name)
    assert key is not None, name
    return key


def dispatch_key_name(device_type: str) -> str:
    """Return the dispatch key for tensors on a device type, such as "CPU" for "cpu"."""
    with short_errors:
        return torch._C._dispatch_key_for_device(device_type)


def device_of_key(key: str) -> str | None:
    if key == "PrivateUse1":
        return torch._C._get_privateuse1_backend_name()
    device_type = key.lower()
    try:
        return device_type if torch._C._dispatch_key_for_device(device_type) == key else None
    except RuntimeError:
        return None


def format_key(key: str) -> str:
    """Format a key for messages, with the device type if it differs: "PrivateUse1 (npu)"."""
    device_type = device_of_key(key)
    return key if device_type in (None, key.lower()) else f"{key} ({device_type})"


def kernel_key(kind: str) -> str:
    """Return the dispatch key at which to register a kernel.

    `kind` is a device type, `"default"` for a kernel that runs on all devices, or the name of a
    dispatch key.
    """
    if kind == "default":
        return "CompositeExplicitAutograd"
    return kind if parse_dispatch_key(kind) is not None else dispatch_key_name(kind)


def redispatch(
    overload: OpOverload, keyset: DispatchKeySet, args: Iterable[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call an operator's kernel for the highest-priority key in `keyset`.

    `OpOverload.redispatch` would be the obvious choice, but it fails for operators with an argument
    named `keyset`.
    """
    return overload._handle.redispatch_boxed(keyset, *args, **kwargs)


def backend_keyset(device_type: str) -> DispatchKeySet:
    return DispatchKeySet(_key(dispatch_key_name(device_type)))


# A context manager that disables `__torch_function__` of tensor subclasses and of modes.
plain_tensors: Callable[[], contextlib.AbstractContextManager[Any]] = torch._C.DisableTorchFunction


def device(name: str | torch.device) -> torch.device:
    """Return `torch.device(name)`, without calling the user's TorchFunctionModes."""
    with torch._C.DisableTorchFunction():
        return torch.device(name)


def function_modes_are_active() -> bool:
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
    return torch._C._ExcludeDispatchKeyGuard(_keyset(names))


@functools.cache
def _keyset(names: tuple[str, ...]) -> DispatchKeySet:
    keyset = _NO_KEYS
    for name in names:
        keyset = keyset.add(_key(name))
    return keyset


def with_overlooked_keys(
    qualname: str, tensors: Iterable[torch.Tensor], keyset: DispatchKeySet = _NO_KEYS
) -> DispatchKeySet:
    """Return the dispatch keys for redispatching a call with tensors that the dispatcher overlooks.

    When the dispatcher computes the keys of a call, it ignores tensors in a list of optional
    tensors (`Tensor?[]`). So a BackendSelect kernel or a mode's handler calls this function before
    it redispatches such a call. The result contains the keys of `tensors` and the keys in `keyset`,
    which are the keys that the dispatcher computed. A mode's handler omits `keyset`, because
    PyTorch does not pass these keys to handlers.
    """
    # Every call has the key ADInplaceOrView, so the kernel at this key has already run by now.
    # Remove the key, so that the kernel does not run twice.
    overlooked = _with_keys_of(tensors, _NO_KEYS).remove(DispatchKey.ADInplaceOrView)
    keyset = (keyset | overlooked) - torch._C._dispatch_tls_local_exclude_set()
    keyset = keyset.remove(DispatchKey.BackendSelect)
    # Redispatching to a fallthrough fails, so remove the keys at which the operator has a
    # fallthrough. The dispatcher skips these keys too when it computes the keys of a call
    # (ATen/core/dispatch/DispatchKeyExtractor.h).
    for key, name in in_order(keyset):
        registered = registered_key(qualname, name)
        if registered is not None:
            passes = falls_through(qualname, registered)
        else:  # no kernel, so the backend fallback runs: a fallthrough for autocast
            passes = name.startswith("Autocast")
        if passes:
            keyset = keyset.remove(key)
    return keyset


def registered_key(qualname: str, key: str) -> str | None:
    """Return `key`, or the alias key `Autograd` if the operator's kernel is registered there.

    Returns None if the operator has neither a kernel nor a fallthrough at `key`.
    """
    # The alias key Autograd stands for every autograd key at which the operator has no kernel.
    for name in (key, "Autograd") if key.startswith("Autograd") else (key,):
        if has_kernel(qualname, name):
            return name
    return None


def in_order(keyset: DispatchKeySet) -> Iterator[tuple[DispatchKey, str]]:
    while (key := keyset.highestPriorityTypeId()) != DispatchKey.Undefined:
        yield key, torch._C._dispatch_key_name(key)
        keyset = keyset.remove(key)


def has_kernel(qualname: str, key: str) -> bool:
    """Return whether an operator has a kernel registered at exactly this key.

    Returns False for keys such as AutogradMTIA, because `parseDispatchKey`
    (c10/core/DispatchKey.cpp) does not support them, so no kernel can be registered for them from
    Python.
    """
    is_readable = parse_dispatch_key(key) is not None
    return is_readable and torch._C._dispatch_has_kernel_for_dispatch_key(qualname, key)


# `falls_through(qualname, key)` returns whether an operator has a fallthrough at a key.
# `computed_kernel(qualname, key)` returns the kernel that the dispatcher would run for an operator
# at a key, which may be a backend fallback.
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
    """Return `keyset` without the keys above the backend key, such as the autograd keys."""
    for key, _ in in_order(keyset):
        if torch._C._dispatch_is_included_in_alias(key, DispatchKey.CompositeExplicitAutograd):
            break
        keyset = keyset.remove(key)
    return keyset


def first_key(keyset: DispatchKeySet) -> str:
    return torch._C._dispatch_key_name(keyset.highestPriorityTypeId())


def has_backend_fallback(keyset: DispatchKeySet) -> bool:
    key = keyset.highestPriorityTypeId()
    return key != DispatchKey.Undefined and torch._C._dispatch_has_backend_fallback(key)


def keys_of_every_device(qualname: str) -> list[str]:
    """Return the keys at which an operator's CompositeExplicitAutograd kernel runs."""
    return [
        key
        for key, text in kernel_table(qualname).items()
        # Omit Undefined, the key of calls without tensors, since a kernel registered there would
        # apply to all keys.
        if "[default backend kernel]" in text and key != "Undefined" and parse_dispatch_key(key)
    ]


def keys_of_call(tensors: Iterable[torch.Tensor]) -> list[str]:
    return [name for _, name in in_order(keyset_of_call(tensors))]


def kernel_table(qualname: str) -> dict[str, str]:
    """Map each dispatch key to a description of the operator's kernel and its registration.

    Keys with a fallthrough are omitted.
    """
    lines = torch._C._dispatch_dump_table(qualname).splitlines()
    pairs = (line.partition(": ") for line in lines)
    return {key: text for key, _, text in pairs if not text.startswith("fallthrough")}


# The dispatch keys that torch.func and torch.export need. PyTorch excludes these keys while a
# TorchDispatchMode handles a call (see `pythonFallback` in
# aten/src/ATen/core/PythonFallbackKernel.cpp).
_FUNC_KEYS = (
    DispatchKey.FuncTorchDynamicLayerFrontMode,
    DispatchKey.FuncTorchDynamicLayerBackMode,
    DispatchKey.FuncTorchBatched,
    DispatchKey.FuncTorchVmapMode,
    DispatchKey.FuncTorchGradWrapper,
)
_EXPORT_KEYS = (
    DispatchKey.PythonTLSSnapshot,
    DispatchKey.Functionalize,
    DispatchKey.PreDispatch,
)
_FUNC = functools.reduce(DispatchKeySet.__or__, map(DispatchKeySet, _FUNC_KEYS))
_EXPORT = functools.reduce(DispatchKeySet.__or__, map(DispatchKeySet, _EXPORT_KEYS))
_TRANSFORMS = _FUNC | _EXPORT
_TRANSFORMS_OF_FAKES = _TRANSFORMS - DispatchKeySet(DispatchKey.Functionalize)


def is_handled_by_mode() -> bool:
    """Return whether the running kernel was called by the handler of a TorchDispatchMode.

    A torch.func transform excludes the same keys as a mode, but inside a transform this function
    returns False, because the call would enter the transform a second time if `with_transforms`
    included the keys again (see `saveLocalDispatchKeySet` in ATen/functorch/Interpreter.h).
    """
    return (
        torch._C._dispatch_tls_is_dispatch_key_excluded(DispatchKey.PythonTLSSnapshot)
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def with_transforms() -> Any:
    """Let a kernel use torch.func and torch.export in a `with` block, even if a mode called it.

    Otherwise such a kernel would fail in the first call of a compiled function, because PyTorch
    runs this call under the mode `_AnalyzeCustomOpInputOutputMode`
    (torch/_functorch/_aot_autograd/runtime_wrappers.py).
    """
    # Leave out the key Functionalize if FakeTensorMode called the kernel. Otherwise the tensors
    # that a fake kernel creates would be functional tensors.
    is_fake = torch._C._meta_in_tls_dispatch_include()
    return _including(_TRANSFORMS_OF_FAKES if is_fake else _TRANSFORMS)


def with_func_transforms() -> Any:
    """Let a fake kernel use torch.func in a `with` block, even if FakeTensorMode called it.

    The other keys of `with_transforms` are left out, because they would make a compiler record the
    fake kernel's calls.
    """
    return _including(_FUNC)


def _including(keys: DispatchKeySet) -> Any:
    excluded = torch._C._dispatch_tls_local_exclude_set() - keys
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded)
