"""The autocast rule: autocast casts an operator's inputs to the registered dtype."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.library

from torchop._compat import autocasting, compilers, dispatch
from torchop._core.call import map_tensors
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, resolve
from torchop._errors import short_repr
from torchop._schema.schema import Argument

Register = TypeVar("Register", bound=Callable[..., None])


class AutocastRule(CompiledRule["Mapping[str, torch.dtype]"]):
    """Maps each device type to the dtype to which autocast casts the inputs of an operator."""

    dtypes: Mapping[str, torch.dtype] = NOTHING

    def compile(self) -> Mapping[str, torch.dtype]:
        return self.dtypes

    def cache_parts(self) -> Iterator[object]:
        yield sorted((device, str(dtype)) for device, dtype in self.dtypes.items())

    def repr_text(self) -> str | None:
        casts = [f"{device} to {dtype}" for device, dtype in self.dtypes.items()]
        return "autocast " + ", ".join(casts) if casts else None

    def register(self, device_type: str, cast_inputs: torch.dtype) -> None:
        definition = self.definition
        if not isinstance(device_type, str):
            raise ValueError(
                f"{definition}: register_autocast expects device_type as a str such as 'cuda', got "
                f"{short_repr(device_type)} of type {type(device_type).__name__}."
            )
        if not autocasting.is_available(device_type):
            raise ValueError(
                f"{definition}: device type {short_repr(device_type)} does not support autocast."
            )
        if not isinstance(cast_inputs, torch.dtype) or not cast_inputs.is_floating_point:
            raise ValueError(
                f"{definition}: register_autocast expects cast_inputs as a floating-point "
                f"torch.dtype such as torch.float16, got {short_repr(cast_inputs)}."
            )
        key = _autocast_key(device_type)

        def install() -> None:
            definition.implement(key, _autocast_kernel(definition, device_type, key))

        with registration_lock:
            self.update(
                None if device_type in self.dtypes else install,
                dtypes={**self.dtypes, device_type: cast_inputs},
            )


def _autocast_key(device_type: str) -> str:
    return "Autocast" + dispatch.dispatch_key_name(device_type)


def _autocast_kernel(definition: Definition, device_type: str, key: str) -> Callable[..., Any]:
    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = definition.plan[AutocastRule][device_type]

        def cast(argument: Argument, tensor: torch.Tensor) -> torch.Tensor:
            eligible = (
                tensor.is_floating_point()
                # The user may have named a custom backend "privateuseone", or by its registered
                # name. Both names have the same autocast key, so compare the keys too.
                and (tensor.device.type == device_type or key == _autocast_key(tensor.device.type))
                and tensor.dtype is not torch.float64  # PyTorch's autocast skips float64
                # The kernel must write into the caller's tensor, so do not cast mutated arguments.
                and not argument.is_mutated
            )
            return tensor.to(dtype) if eligible else tensor

        args, kwargs = map_tensors(definition.schema, args, kwargs, cast)
        with autocasting.disabled(device_type, key):
            return definition.overload(*args, **kwargs)

    return kernel


def _require_both(register: Register) -> Register:
    """Wrap `register_autocast` so that the error for a missing argument names the operator.

    Default values for `device_type` and `cast_inputs` would be simpler, but type checkers would
    then accept calls without these arguments.
    """

    @functools.wraps(register)
    def checked(*args: Any, **kwargs: Any) -> None:
        values = [*args[1:], *(value for name, value in kwargs.items() if name != "lib")]
        if args and len(values) == 1:
            raise TypeError(
                f"{resolve(args[0], 'register_autocast', kwargs.get('lib'))}: register_autocast is "
                "missing one of 'device_type' and 'cast_inputs', because it got only "
                f"{short_repr(values[0])}. Write both, as in "
                "register_autocast('cuda', torch.float16)."
            )
        register(*args, **kwargs)

    return checked  # type: ignore[return-value]  # it has the signature of `register`


@_require_both
def register_autocast(
    op: OpLike,
    /,
    device_type: str,
    cast_inputs: torch.dtype,
    *,
    lib: torch.library.Library | None = None,
) -> None:
    """Register the dtype to which autocast casts the inputs of an operator.

    Inside `torch.autocast(device_type)`, a call casts the floating-point tensors on that device,
    except for float64 tensors and mutated arguments. The operator then runs with autocast disabled.
    If the device type already has a dtype, the new dtype replaces it.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        device_type: `"cpu"`, `"cuda"`, or any other device type that supports autocast.
        cast_inputs: a floating-point dtype.
        lib: the library that owns the registration. By default, the registration is permanent.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuntimeError: PyTorch does not know the device type.
        TypeError: the device type or the dtype is missing.
        ValueError: the device type does not support autocast, or the dtype is not floating-point.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::plus_one", mutates_args=())
        ... def plus_one(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1
        >>> torchop.register_autocast("docs::plus_one", "cpu", torch.bfloat16)
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     plus_one(torch.ones(1))
        tensor([2.], dtype=torch.bfloat16)

    Based on `torch.library.register_autocast`.
    """
    resolve(op, "register_autocast", lib).rule(AutocastRule).register(device_type, cast_inputs)
