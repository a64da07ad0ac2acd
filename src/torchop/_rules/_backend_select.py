"""Choosing a backend where the dispatcher cannot: no tensors, or tensors in an optional list.

Both cases are answered at the BackendSelect key, which every call passes after autograd and the
modes, and before a backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchop import _compat
from torchop._contract import tensors_in
from torchop._definition import Definition
from torchop._schema.schema import OPTIONAL_TENSOR_LISTS, Schema

_DEVICE_KINDS = ("Device", "Optional[Device]")


def install_for_factory(definition: Definition) -> None:
    """Sends a call without tensors to the backend that its `device` argument names.

    Raises:
        ValueError: the operator takes no tensor and has no such argument.
    """
    schema = definition.schema
    if any(argument.holds_tensors for argument in schema.arguments):
        return
    if _device_argument(schema) is None:
        raise ValueError(
            f"{definition}: Functions without tensor inputs are required to have a `device: "
            f"torch.device` argument when a kernel is for some devices only. Got {schema}."
        )
    if not _compat.has_kernel(str(definition), "BackendSelect"):
        definition.implement("BackendSelect", _by_device(definition), with_keyset=True)


def install_for_optional_lists(definition: Definition) -> None:
    """Lets the tensors of a `Tensor[]?` argument decide, as those of `Tensor[]` do."""
    if any(argument.kind in OPTIONAL_TENSOR_LISTS for argument in definition.schema.arguments):
        definition.implement("BackendSelect", _by_overlooked_tensors(definition), with_keyset=True)


def requested_device(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """The device type that a call without tensors asks for; None if it cannot ask."""
    found = _device_argument(schema)
    if found is None or any(argument.holds_tensors for argument in schema.arguments):
        return None
    name, position, default = found
    device = args[position] if position is not None and position < len(args) else default
    device = kwargs.get(name, device)
    if device is None:
        return torch.get_default_device().type
    return torch.device(device).type


def _device_argument(schema: Schema) -> tuple[str, int | None, Any] | None:
    for argument in schema.arguments:
        if argument.name == "device" and argument.kind in _DEVICE_KINDS:
            position = None if argument.keyword_only else schema.positional.index(argument)
            return argument.name, position, argument.default
    return None


def _by_device(definition: Definition) -> Callable[..., Any]:
    @_compat.never_traced
    def kernel(keyset: _compat.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        device = requested_device(definition.schema, args, kwargs)
        assert device is not None  # install_for_factory found the argument
        return definition.overload.redispatch(_compat.backend_keyset(device), *args, **kwargs)

    return kernel


def _by_overlooked_tensors(definition: Definition) -> Callable[..., Any]:
    schema = definition.schema
    places = [
        (a.name, None if a.keyword_only else schema.positional.index(a))
        for a in schema.arguments
        if a.kind in OPTIONAL_TENSOR_LISTS
    ]

    @_compat.never_traced
    def kernel(keyset: _compat.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        lists = [
            kwargs.get(name) if position is None or position >= len(args) else args[position]
            for name, position in places
        ]
        keyset = _compat.with_overlooked_keys(str(definition), keyset, tensors_in(lists))
        return definition.overload.redispatch(keyset, *args, **kwargs)

    return kernel
