"""Select the backend of a call if the dispatcher cannot infer it from the arguments.

There are two such cases: factory functions, which take a device instead of tensors, and operators
with optional lists of tensors (`Tensor[]?`), which the dispatcher ignores when it computes the
dispatch keys. In both cases, a kernel at the BackendSelect key redispatches the call to the right
backend, after autograd and modes have run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import compilers, dispatch, functorch
from torchop._compat.classes import DispatchKeySet
from torchop._core.call import passed, tensors_in
from torchop._core.definition import Definition
from torchop._schema.schema import OPTIONAL_TENSOR_LISTS, Argument, Schema

_DEVICE_KINDS = ("Device", "Optional[Device]")


def install_for_factory(definition: Definition) -> None:
    """If the operator takes no tensors, make its `device` argument select the backend."""
    schema = definition.schema
    if any(argument.holds_tensors for argument in schema.arguments):
        return
    if _device_argument(schema) is None:
        raise ValueError(
            f"{definition}: Functions without tensor inputs are required to have a `device: "
            f"torch.device` argument when a kernel is for some devices only. Got {schema}."
        )
    if not dispatch.has_kernel(str(definition), "BackendSelect"):
        definition.implement("BackendSelect", _by_device(definition), with_keyset=True)


def install_for_optional_lists(definition: Definition) -> None:
    """Make tensors in arguments of type `Tensor[]?` and `Tensor?[]?` take part in the dispatch."""
    if definition.schema.has_optional_tensor_lists:
        definition.implement("BackendSelect", _by_overlooked_tensors(definition), with_keyset=True)
        definition.implement(functorch.ENTRY, _check_transforms(definition), with_keyset=True)


def requested_device(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Return the device type of a call to a factory function, and None for other operators."""
    argument = _device_argument(schema)
    if argument is None or any(argument.holds_tensors for argument in schema.arguments):
        return None
    values = dict(passed([(schema.arguments.index(argument), argument.name)], args, kwargs))
    device = values.get(argument.name, argument.default)
    # None means the CPU, even under `with torch.device(...)`, because that context manager changes
    # the default device of functions such as torch.zeros, but not of operators in torch.ops.
    return "cpu" if device is None else dispatch.device(device).type


def _device_argument(schema: Schema) -> Argument | None:
    candidates = (a for a in schema.arguments if a.name == "device" and a.kind in _DEVICE_KINDS)
    return next(candidates, None)


def _by_device(definition: Definition) -> Callable[..., Any]:
    @compilers.never_traced
    def kernel(keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        device = requested_device(definition.schema, args, kwargs)
        assert device is not None  # install_for_factory requires the argument
        keyset = dispatch.backend_keyset(device)
        return dispatch.redispatch(definition.overload, keyset, args, kwargs)

    return kernel


def _by_overlooked_tensors(definition: Definition) -> Callable[..., Any]:
    overlooked = _tensors_of_call(definition.schema, are_overlooked=True)

    @compilers.never_traced
    def kernel(keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        keyset = dispatch.with_overlooked_keys(str(definition), overlooked(args, kwargs), keyset)
        return dispatch.redispatch(definition.overload, keyset, args, kwargs)

    return kernel


def _check_transforms(definition: Definition) -> Callable[..., Any]:
    # functorch does not see tensors in optional lists, so it would silently skip its transforms if
    # all wrapped tensors of a call are in such lists. Raise an error instead. The check runs at
    # functorch's own dispatch key, because a BackendSelect kernel would run too late.
    overlooked = _tensors_of_call(definition.schema, are_overlooked=True)
    visible_tensors = _tensors_of_call(definition.schema, are_overlooked=False)
    transform = dispatch.computed_kernel(str(definition), functorch.ENTRY)

    @compilers.never_traced
    def kernel(keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        visible = list(visible_tensors(args, kwargs))
        for tensor in overlooked(args, kwargs):
            is_batched = functorch.is_batched(tensor)
            if functorch.is_wrapped(tensor) and (
                not visible or (is_batched and not any(map(functorch.is_batched, visible)))
            ):
                raise NotImplementedError(
                    f"{definition}: the transforms of torch.func do not see tensors that are only "
                    f"in an optional list, and would skip the operator. Make the list required "
                    f"(it may be empty). Got {definition.schema}."
                )
        return transform.call_boxed(keyset, *args, **kwargs)

    return kernel


def _tensors_of_call(
    schema: Schema, *, are_overlooked: bool
) -> Callable[[Sequence[Any], Mapping[str, Any]], Iterator[Tensor]]:
    """Return a function that yields some of the tensors in the arguments of a call.

    If `are_overlooked` is true, the function yields the tensors in optional lists, which the
    dispatcher overlooks when it selects a kernel. Otherwise, it yields all other tensors.
    """
    places = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if (argument.kind in OPTIONAL_TENSOR_LISTS) is are_overlooked
    ]
    return lambda args, kwargs: tensors_in(value for _, value in passed(places, args, kwargs))
