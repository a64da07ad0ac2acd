"""`register_kernel`: register the kernel of an operator for some device types."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.library

from torchop._compat import compilers
from torchop._core.registry import OpLike, resolve
from torchop._rules.kernels.devices import DeviceTypes, device_list
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.callables import Function, Lambda, decorator_or_call


@compilers.eager_only
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
    """Register a kernel of an operator for some device types.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        device_types: a device type such as `"cpu"` or `"cuda"`, or a sequence of device types. None
            (or `"default"`) means all devices for which no other kernel is registered. For an
            operator that `custom_op` did not define, this may also be a dispatch key, unless
            `provider` is given.
        func: the kernel. It takes the operator's arguments. Omit it to use `register_kernel` as a
            decorator.
        provider: the name of the library or technique that the kernel comes from, such as
            `"triton"`. The kernel is then an alternative to the reference kernel. Calls use it only
            if the operator's order of providers contains this name; see `CustomOp.set_priority`,
            `torchop.set_priority` and `torchop.priority`. Without `provider`, the kernel becomes
            the reference kernel on these devices. Except for `lib`, the arguments below are only
            allowed together with `provider`.
        supported: whether the kernel can run in this process, for example because a package is
            installed. Either a bool, or a function without parameters that returns a bool and runs
            once, when the answer is first needed.
        supports: a function that takes the operator's arguments and returns whether the kernel
            supports the call. It receives tensors without data and may read only shapes, strides,
            dtypes, devices and plain values, because the answer is cached for all calls with the
            same shapes, strides and so on.
        batch_invariant: whether each row of the result is bitwise the same regardless of the other
            rows in the batch.
        deterministic: whether equal inputs give bitwise equal results. If not, the kernel is
            skipped under `torch.use_deterministic_algorithms`.
        tolerance: the allowed difference from the result of the reference kernel in tests, as a
            dict from dtypes to `(rtol, atol)`.
        configs: a list of dicts of additional keyword arguments for this kernel, such as tile
            sizes. `torchop.testing.tune` measures all of them. Untuned calls use the first dict.
        lib: the library that owns the registration, so that closing it removes the kernel. By
            default, the registration is permanent.

    Returns:
        `func`, or a decorator if `func` is omitted.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: `func` does not accept the operator's arguments, or a provider's kernel
            has different names or defaults for them.
        ProviderError: the provider's name is invalid. This error is a `ValueError`.
        RuntimeError: PyTorch does not know a device type.
        NotImplementedError: `provider` is given, but torchop did not define the operator.
        ValueError: the operator takes neither a tensor nor a `device`, so a call could not select a
            device type.
        TypeError: an argument for providers has the wrong type, or is passed without `provider`.

    Warns:
        RedefinitionWarning: this replaces a kernel of the same provider that another module
            registered.

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
    devices = device_list(device_types)  # raises now instead of when the decorator is applied
    if provider is None:
        rule = resolve(op, "register_kernel", lib).rule(KernelRule)
        _check_options(rule.definition, options)
        return decorator_or_call(lambda function: rule.register(device_types, function), func)
    return decorator_or_call(
        lambda function: register_provider(op, devices, function, provider, lib, options), func
    )


# The function that registers a provider's kernel. The package `_rules/providers` sets this
# variable, because importing that package here would be circular.
register_provider: Any = None


def _check_options(op: object, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(register_kernel).parameters
    given = [name for name, value in options.items() if value is not parameters[name].default]
    if given:
        raise TypeError(
            f"{op}: register_kernel takes {given[0]} only for the kernel of a provider. Name the "
            "provider: provider='...'."
        )
