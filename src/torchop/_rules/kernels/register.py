"""`register_kernel`, for reference kernels and for kernels of providers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.library

from torchop._core.registry import OpLike, resolve
from torchop._rules.kernels.devices import DeviceTypes, device_list
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.callables import Function, Lambda, decorator_or_call


def register_kernel(
    op: OpLike,
    device_types: DeviceTypes,
    func: Function | Lambda | None = None,
    /,
    *,
    provider: str | None = None,
    supported: bool | Callable[[], bool] = True,
    supports: Callable[..., bool] | None = None,
    batch_invariant: bool = False,
    deterministic: bool = True,
    tolerance: Mapping[torch.dtype, tuple[float, float]] | None = None,
    configs: Sequence[Mapping[str, Any]] = (),
    lib: torch.library.Library | None = None,
) -> Function:
    """Register the implementation of an operator for some device types.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        device_types: `"cpu"`, `"cuda"`, any other device type, a sequence of them, or None (also
            written `"default"`) for all devices without their own kernel. For an operator that
            `custom_op` did not define, also a dispatch key, except with `provider`.
        func: the kernel; it takes the operator's arguments. Without it, a decorator is returned.
        provider: the provider of this kernel, such as `"triton"`. Without it, the kernel becomes
            the reference on these devices. With it, the kernel is an alternative to the reference,
            used when a priority names the provider: `CustomOp.set_priority`,
            `torchop.set_priority`, `torchop.priority`. The following arguments are for providers
            only.
        supported: whether the kernel can run in this process: a bool, or a function without
            parameters, called once when a call first needs the answer.
        supports: a predicate of the operator's arguments: whether the kernel supports a call. It
            gets tensors without data. It may read shapes, strides, dtypes, devices and plain
            values, and the answer is cached for all calls with the same ones.
        batch_invariant: whether a row has the same bits for any other rows in the batch.
        deterministic: whether equal calls give equal bits. If not, calls skip the kernel under
            `torch.use_deterministic_algorithms`.
        tolerance: the allowed difference from the reference: `(rtol, atol)` by dtype.
        configs: keyword arguments of this kernel alone, such as tile sizes, as a list of dicts. The
            first dict is used.
        lib: the library that owns the registration, so that closing it removes the kernel; by
            default the registration is permanent.

    Returns:
        `func`; without it, a decorator.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: `func` does not accept the operator's arguments, or a provider's kernel
            has other names or defaults for them.
        ProviderError: a `ValueError`: the provider's name is invalid.
        RuntimeError: PyTorch does not know a device type.
        NotImplementedError: a provider, for an operator that torchop did not define.
        ValueError: the operator has no argument that could select the device.
        TypeError: an argument for providers has the wrong type, or is passed without `provider`.

    Warns:
        RedefinitionWarning: another module registered a kernel of this provider.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::double", mutates_args=(), device_types="cuda")
        ... def double(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @torchop.register_kernel("docs::double", "cpu")
        ... def _(x):
        ...     return x + x
        >>> double(torch.ones(2))
        tensor([2., 2.])
        >>> @double.register_kernel("cpu", provider="product", supports=lambda x: x.ndim == 1)
        ... def _(x):
        ...     return 2 * x
        >>> double.set_priority(["product"])
        >>> torchop.explain(double, torch.ones(2)).provider
        'product'

    Based on `torch.library.register_kernel`.
    """
    options: dict[str, Any] = {
        "supported": supported,
        "supports": supports,
        "batch_invariant": batch_invariant,
        "deterministic": deterministic,
        "tolerance": tolerance,
        "configs": configs,
    }
    devices = device_list(device_types)  # validate now, even if the decorator is applied later
    if provider is None:
        rule = resolve(op, "register_kernel", lib).rule(KernelRule)
        _check_options(rule.definition, options)
        return decorator_or_call(lambda function: rule.register(device_types, function), func)
    return decorator_or_call(
        lambda function: register_provider(op, devices, function, provider, lib, options), func
    )


# Set by `_rules/providers`, which imports this package's kernel rule. Called with the operator,
# device types, function, provider, library and options.
register_provider: Any = None


def _check_options(op: object, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(register_kernel).parameters
    given = [name for name, value in options.items() if value is not parameters[name].default]
    if given:
        raise TypeError(
            f"{op}: register_kernel takes {given[0]} only for the kernel of a provider. Name the "
            "provider: provider='...'."
        )
