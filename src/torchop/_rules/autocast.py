"""The autocast rule: autocast casts an operator's inputs to the registered dtype."""

from __future__ import annotations

import bisect
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast, get_args, overload

import torch
import torch.library
from torch import Tensor

from torchop._compat import autocasting, compilers, dispatch, schemas
from torchop._core.call import replaced, tensors_in
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import OpLike, resolve
from torchop._errors import short_repr

Policy: TypeAlias = Literal["low_precision", "float32", "promote"]
POLICIES = get_args(Policy)


class AutocastRule(CompiledRule["Mapping[str, torch.dtype | Policy]"]):
    """The dtype or policy that autocast uses to cast the inputs, for each device type."""

    dtypes: Mapping[str, torch.dtype | Policy] = NOTHING

    def compile(self) -> Mapping[str, torch.dtype | Policy]:
        return self.dtypes

    def cache_parts(self) -> Iterator[object]:
        yield sorted((device, str(dtype)) for device, dtype in self.dtypes.items())

    def repr_text(self) -> str | None:
        if not self.dtypes:
            return None
        if len({*self.dtypes.values()}) == 1 and len(self.dtypes) > 1:
            return f"autocast to {next(iter(self.dtypes.values()))}"
        return "autocast " + ", ".join(f"{device} to {to}" for device, to in self.dtypes.items())

    def register(self, device_types: Sequence[str], cast_inputs: torch.dtype | Policy) -> None:
        definition = self.definition
        for device_type in device_types:
            if not isinstance(device_type, str):
                raise ValueError(
                    f"{definition}: register_autocast expects device_type as a str such as 'cuda', "
                    f"got {short_repr(device_type)} of type {type(device_type).__name__}."
                )
            if not autocasting.is_available(device_type):
                raise ValueError(
                    f"{definition}: device type {short_repr(device_type)} does not support "
                    "autocast."
                )
        is_dtype = isinstance(cast_inputs, torch.dtype) and cast_inputs.is_floating_point
        if not is_dtype and not (isinstance(cast_inputs, str) and cast_inputs in POLICIES):
            raise ValueError(
                f"{definition}: register_autocast expects cast_inputs as a floating-point "
                f"torch.dtype such as torch.float16, or as a policy ({', '.join(POLICIES)}); got "
                f"{short_repr(cast_inputs)}."
            )

        def install() -> None:
            for device_type in device_types:
                key = _autocast_key(device_type)
                if key not in definition.registered:
                    definition.implement(key, _autocast_kernel(definition, device_type, key))

        rules = [f"autocast rule for {device_type}" for device_type in device_types]
        with definition.registered.registering(*rules), registration_lock:
            self.update(install, dtypes={**self.dtypes, **dict.fromkeys(device_types, cast_inputs)})


def _autocast_key(device_type: str) -> str:
    return "Autocast" + dispatch.dispatch_key_name(device_type)


def _autocast_kernel(definition: Definition, device_type: str, key: str) -> Callable[..., Any]:
    schema = definition.schema
    # Do not cast mutated arguments, because the kernel must write into the caller's tensor instead
    # of a copy.
    castable = {a.name for a in schema.arguments if a.holds_tensors and not a.is_mutated}
    positions = [n for n, a in enumerate(schema.positional) if a.name in castable]
    names = [a.name for a in schema.keyword_only if a.name in castable]

    is_here = _has_device_type(device_type, key)

    def is_cast(tensor: Tensor) -> bool:
        return tensor.dtype in _CAST and is_here(tensor)

    def dtype_of_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.dtype | None:
        wanted = definition.compiled(AutocastRule)[device_type]
        if isinstance(wanted, torch.dtype):
            return wanted
        if wanted == "float32":
            return torch.float32
        if wanted == "low_precision":
            return torch.get_autocast_dtype(device_type)
        values = (args[n] for n in positions if n < len(args))
        tensors = tensors_in((*values, *(kwargs.get(name) for name in names)))
        dtypes = {tensor.dtype for tensor in tensors if is_cast(tensor) and tensor.itemsize > 1}
        return functools.reduce(torch.promote_types, dtypes) if dtypes else None

    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of_call(args, kwargs)
        convert = _METHODS.get(dtype) or (lambda tensor: tensor.to(dtype))

        def cast(tensor: Tensor) -> Tensor:
            return convert(tensor) if is_cast(tensor) else tensor

        with autocasting.disabled(device_type, key):
            if dtype is not None:
                passed = list(args)
                for n in positions[: bisect.bisect_left(positions, len(passed))]:
                    value = passed[n]
                    if type(value) is not Tensor:
                        passed[n] = replaced(value, Tensor, cast)
                    elif value.dtype is not dtype and is_cast(value):
                        passed[n] = convert(value)
                for name in names:
                    if name in kwargs:
                        kwargs[name] = replaced(kwargs[name], Tensor, cast)
                return definition.overload(*passed, **kwargs)
            return definition.overload(*args, **kwargs)

    return kernel


def _has_device_type(device_type: str, key: str) -> Callable[[Tensor], bool]:
    """Return a function that checks whether a tensor is on a device of this type."""
    if device_type in ("cpu", "cuda"):
        return operator.attrgetter(f"is_{device_type}")  # five times as fast as `device.type`
    # A custom backend has two names, "privateuseone" and its registered name. Both map to the same
    # autocast key, so compare the keys instead of the names.
    return lambda tensor: _autocast_key(tensor.device.type) == key


# These methods are faster than `to`, because they have no arguments to parse.
_METHODS: dict[torch.dtype | None, Callable[[Tensor], Tensor]] = {
    torch.float32: Tensor.float,
    torch.bfloat16: Tensor.bfloat16,
    torch.float16: Tensor.half,
}
# ATen's autocast skips float64 too (`is_eligible` in ATen/autocast_mode.h).
# This is a tuple with the most common dtypes first, because searching it is faster than a lookup in
# a set.
_CAST = tuple(
    dict.fromkeys(
        dtype
        for dtype in (*filter(None, _METHODS), *schemas.dtypes().values())
        if dtype.is_floating_point and dtype is not torch.float64
    )
)


_MISSING: Any = object()  # not None, because a caller may pass None by mistake


@overload
def register_autocast(
    op: OpLike, policy: Policy, /, *, lib: torch.library.Library | None = None
) -> None: ...


@overload
def register_autocast(
    op: OpLike,
    /,
    device_type: str,
    cast_inputs: torch.dtype | Policy,
    *,
    lib: torch.library.Library | None = None,
) -> None: ...


@compilers.eager_only
def register_autocast(
    op: OpLike,
    /,
    device_type: Any = _MISSING,
    cast_inputs: Any = _MISSING,
    *,
    lib: torch.library.Library | None = None,
) -> None:
    """Register how autocast casts the inputs of an operator.

    Inside `torch.autocast(device_type)`, a call casts the floating-point tensors on that device,
    including tensors in lists and structures. It does not cast float64 tensors and mutated
    arguments. The kernel and the backward formula then run with autocast disabled. Registering
    again for the same device type replaces the earlier registration.

    Args:
        op: the operator, as its handle (the object that `custom_op` returned), `"ns::name"`,
            `"ns::name.overload"`, an `OpOverload`, or a packet with one overload.
        device_type: `"cpu"`, `"cuda"`, or any other device type that supports autocast. If you pass
            only a policy, it applies to all device types.
        cast_inputs: a floating-point dtype, or one of ATen's policies: `"low_precision"` casts to
            the dtype of the autocast region, `"float32"` to float32, and `"promote"` to the widest
            dtype of the tensors that are cast.
        lib: the library that owns the registration, so that closing it removes the registration. By
            default, the registration is permanent.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuntimeError: PyTorch does not know the device type.
        TypeError: the device type or the dtype is missing.
        ValueError: the device type does not support autocast, or `cast_inputs` is neither a
            floating-point dtype nor a policy.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::plus_one", mutates_args=())
        ... def plus_one(x: torch.Tensor) -> torch.Tensor:
        ...     return x + 1
        >>> torchop.register_autocast("docs::plus_one", "low_precision")
        >>> with torch.autocast("cpu", dtype=torch.bfloat16):
        ...     plus_one(torch.ones(1))
        tensor([2.], dtype=torch.bfloat16)

    Based on `torch.library.register_autocast`.
    """
    rule = resolve(op, "register_autocast", lib).rule(AutocastRule)
    if cast_inputs is _MISSING and isinstance(device_type, str) and device_type in POLICIES:
        rule.register(autocasting.device_types(), cast(Policy, device_type))
    elif _MISSING in (device_type, cast_inputs):
        given = device_type if cast_inputs is _MISSING else cast_inputs
        got = "" if given is _MISSING else f", because it got only {short_repr(given)}"
        raise TypeError(
            f"{rule.definition}: register_autocast is missing one of 'device_type' and "
            f"'cast_inputs'{got}. Write both, as in register_autocast('cuda', torch.float16), or "
            "only a policy, as in register_autocast('low_precision')."
        )
    else:
        rule.register([device_type], cast_inputs)
