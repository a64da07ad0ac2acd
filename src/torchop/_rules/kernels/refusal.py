"""Calls on a device without a kernel: refused, or handed over to the fallback of its backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from typing_extensions import Never  # which typing has from Python 3.11 on

from torchop._compat import dispatch
from torchop._compat.classes import DispatchKeySet
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._errors import MissingKernelError
from torchop._rules.kernels import backend_select

EVERY_DEVICE = dispatch.kernel_key("default")


class Refusals:
    """The places in the dispatcher's table where calls end that no kernel of the operator serves.

    The kernel there is one for every device, and therefore hides the fallback that a backend may
    have for all operators, such as PyTorch's that runs them on the CPU. So it can be taken back: it
    moves to the keys of the other backends when a call is on a device with a fallback.
    """

    def __init__(self, definition: Definition, kernel: Callable[..., Any]) -> None:
        self._definition = definition
        self._kernel = kernel
        # By dispatch key, what takes the kernel back.
        self._places: dict[str, Callable[[], None]] = {}
        # What was taken back, because calls that are in such a kernel would go on in freed memory.
        self._held: list[Any] = []
        self._refuse_at(EVERY_DEVICE)

    def _refuse_at(self, key: str) -> None:
        self._places[key] = self._definition.implement_for_now(key, self._kernel)

    def give_way(self) -> None:
        """Leaves all devices to a kernel for every device, which is there by now."""
        for key in list(self._places):
            self._take_back(key)

    def keys_of_fallback(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> DispatchKeySet | None:
        """The keys that redispatch a call to the fallback of its backend; None if it has none."""
        schema = self._definition.schema
        device = backend_select.requested_device(schema, args, kwargs)
        if device is None:
            keyset = dispatch.keyset_of_call(tensors_in((*args, *kwargs.values())))
        else:
            keyset = dispatch.backend_keyset(device)
        return self.uncovered(keyset)

    def uncovered(self, keyset: DispatchKeySet) -> DispatchKeySet | None:
        """The same for a call with these keys."""
        keyset = dispatch.from_backend(keyset)
        if not dispatch.has_backend_fallback(keyset):
            return None
        with registration_lock:
            self._uncover(dispatch.first_key(keyset))
        return keyset

    def _uncover(self, key: str) -> None:
        # Calls of other threads may have found the kernel, and not have come to it yet.
        self._held.append(dispatch.computed_kernel(str(self._definition), key))
        if EVERY_DEVICE in self._places:
            for other in dispatch.keys_of_every_device(str(self._definition)):
                if other != key:
                    self._refuse_at(other)
            self._take_back(EVERY_DEVICE)
        if key in self._places:  # another call may have been first
            self._take_back(key)

    def _take_back(self, key: str) -> None:
        self._places.pop(key)()


def refuse(
    definition: Definition,
    kernels: Mapping[str | None, object],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Never:
    """Says which device has no kernel, and which have one."""
    served = sorted(device for device in kernels if device)
    have = f"it has kernels for: {', '.join(served)}" if served else "it has no kernel at all"
    tensors = list(tensors_in((*args, *kwargs.values())))
    asked = backend_select.requested_device(definition.schema, args, kwargs) or ", ".join(
        sorted({tensor.device.type for tensor in tensors})
    )
    kinds = sorted({_kind(t) for t in tensors} - {str(torch.strided)})
    if not asked:
        raise MissingKernelError(
            f"{definition} was called without a tensor, so there is no device to choose a kernel "
            f"by; {have}. Register one for every device: register_kernel(None)."
        )
    if kinds and asked in served:
        raise MissingKernelError(
            f"{definition} does not have a kernel registered for {asked} with the layout "
            f"{', '.join(kinds)}; {have}, which are for dense tensors. Register one for every "
            "device and layout: register_kernel(None)."
        )
    raise MissingKernelError(
        f"{definition} does not have a kernel registered for {asked}; {have}. Add one with "
        f"@{definition.name.name}.register_kernel({asked!r})."
    )


def _kind(tensor: torch.Tensor) -> str:
    """The property that decides, together with the device, which backend a tensor has."""
    return "quantized" if tensor.is_quantized else str(tensor.layout)
