"""`register_kernel`: register an operator's reference kernels and its providers' kernels."""

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
        provider: the name of the library or technique that provides this kernel, such as
            `"triton"`. The kernel is then an alternative to the reference, used when a priority
            names the provider: see `CustomOp.set_priority`, `torchop.set_priority` and
            `torchop.priority`. Without `provider`, the kernel becomes the reference on these
            devices. The arguments below, except `lib`, require `provider`.
        supported: whether the kernel can run in this process: a bool, or a function without
            parameters that is called once, when it is first needed.
        supports: a function of the operator's arguments that returns whether the kernel supports
            the call. Tensors are passed without data. It may read shapes, strides, dtypes, devices
            and plain values; its result is cached for all calls in which these are equal.
        batch_invariant: whether each row of the result is bitwise independent of the other rows in
            the batch.
        deterministic: whether equal inputs give bitwise equal results. If not, the kernel is
            skipped under `torch.use_deterministic_algorithms`.
        tolerance: the allowed difference from the reference, a dict from dtype to `(rtol, atol)`.
        configs: a list of dicts of additional keyword arguments for this kernel, such as tile
            sizes. The first dict is the default.
        lib: the library that owns the registration. Closing it removes the kernel. By default, the
            registration is permanent.

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
    devices = device_list(device_types)  # raise here, not when the decorator is applied
    if provider is None:
        rule = resolve(op, "register_kernel", lib).rule(KernelRule)
        _check_options(rule.definition, options)
        return decorator_or_call(lambda function: rule.register(device_types, function), func)
    return decorator_or_call(
        lambda function: register_provider(op, devices, function, provider, lib, options), func
    )


# A function that takes the operator, the device types, the function, the provider, the library and
# the options. `_rules/providers` sets it, because that package imports this one.
register_provider: Any = None


def _check_options(op: object, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(register_kernel).parameters
    given = [name for name, value in options.items() if value is not parameters[name].default]
    if given:
        raise TypeError(
            f"{op}: register_kernel takes {given[0]} only for the kernel of a provider. Name the "
            "provider: provider='...'."
        )
