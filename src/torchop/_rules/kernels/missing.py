"""Handle calls on devices without a kernel.

If the backend has a fallback, such as one that runs unsupported operators on the CPU, the call goes
to that fallback. Otherwise, the call raises an error that lists the supported devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import Never  # in typing since Python 3.11

from torchop._compat import compilers, dispatch
from torchop._compat.classes import DispatchKeySet
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registered import Key
from torchop._errors import MissingKernelError
from torchop._rules.kernels import backend_select

EVERY_DEVICE = dispatch.kernel_key("default")


class RaisingKernels:
    """The dispatcher kernels that raise an error on devices without a kernel.

    Initially, a single raising kernel at CompositeExplicitAutograd covers every device. But the
    dispatcher would prefer this kernel to the fallback of a backend. So the first call on a device
    that has a fallback removes the kernel, and registers one for each of the other backends, to let
    the fallback run.
    """

    def __init__(self, definition: Definition, kernel: Callable[..., Any]) -> None:
        self._definition = definition
        self._run = kernel
        # Keeps removed kernels alive, because other threads may still be running them.
        self._held: list[Any] = []
        definition.implement_temporarily(EVERY_DEVICE, self.kernel)

    @compilers.never_traced
    def kernel(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def remove_all(self) -> None:
        """Remove the raising kernels, because a kernel for every device was registered."""
        for key in self._definition.registered:
            self._remove(key)

    def expose_fallback_of_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> DispatchKeySet | None:
        """If the call's backend has a fallback, remove the raising kernel that hides the fallback.

        Return the dispatch keys for redispatching the call to the fallback, or None if the backend
        has no fallback.
        """
        schema = self._definition.schema
        device = backend_select.requested_device(schema, args, kwargs)
        if device is None:
            keyset = dispatch.keyset_of_call(tensors_in((*args, *kwargs.values())))
        else:
            keyset = dispatch.backend_keyset(device)
        return self.expose_fallback(keyset)

    def expose_fallback(self, keyset: DispatchKeySet) -> DispatchKeySet | None:
        keyset = dispatch.from_backend(keyset)
        if not dispatch.has_backend_fallback(keyset):
            return None
        with registration_lock:
            self._expose(dispatch.first_key(keyset))
        return keyset

    def _expose(self, key: str) -> None:
        # Keep the kernel alive, because another thread may have looked it up but not called it yet.
        self._held.append(dispatch.computed_kernel(str(self._definition), key))
        if self._raises_at(EVERY_DEVICE):
            for other in dispatch.keys_of_every_device(str(self._definition)):
                if other != key:
                    self._definition.implement_temporarily(other, self.kernel)
            self._remove(EVERY_DEVICE)
        self._remove(key)

    def _remove(self, key: Key) -> None:
        if self._raises_at(key):
            self._definition.registered.remove(key)

    def _raises_at(self, key: Key) -> bool:
        return bool(self._definition.registered.kernel(key) == self.kernel)


def raise_missing_kernel(
    definition: Definition,
    kernels: Mapping[str | None, object],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Never:
    served = sorted(device for device in kernels if device)
    have = f"it has kernels for: {', '.join(served)}" if served else "it has no kernel at all"
    tensors = list(tensors_in((*args, *kwargs.values())))
    requested = backend_select.requested_device(definition.schema, args, kwargs) or ", ".join(
        sorted({tensor.device.type for tensor in tensors})
    )
    kinds = sorted({_kind(t) for t in tensors} - {str(torch.strided)})
    if not requested:
        raise MissingKernelError(
            f"{definition} was called without a tensor, so no device selects a kernel; {have}. "
            "Register one for every device: register_kernel(None)."
        )
    if kinds and requested in served:
        raise MissingKernelError(
            f"{definition} does not have a kernel registered for {requested} with the layout "
            f"{', '.join(kinds)}; {have}, but only for dense tensors. Register one for every "
            "device and layout: register_kernel(None)."
        )
    raise MissingKernelError(
        f"{definition} does not have a kernel registered for {requested}; {have}. Add one with "
        f"@{definition.name.name}.register_kernel({requested!r})."
    )


def _kind(tensor: torch.Tensor) -> str:
    return "quantized" if tensor.is_quantized else str(tensor.layout)
