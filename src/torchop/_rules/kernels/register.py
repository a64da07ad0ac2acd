"""Registering kernels: the reference, and those of providers beside it."""

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
    """Registers the implementation of an operator for some device types.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        device_types: `"cpu"`, `"cuda"`, any other device type, a sequence of them, or None (also
            written `"default"`) for all devices without their own kernel. For an operator that
            `custom_op` did not define, also a dispatch key, except for a provider.
        func: the kernel; it takes the operator's arguments. Without it, a decorator is returned.
        provider: the name of who provides this kernel, such as `"triton"`. Without it, the kernel
            is the reference on these devices, in place of the one before. With it, the kernel
            stands beside the reference, and beside those of other providers, and runs where an
            order asks for it: `CustomOp.set_priority`, `torchop.set_priority`, `torchop.priority`.
            The arguments below are for providers only.
        supported: whether the kernel can run in this process: a bool, or a function without
            parameters, which is asked once, when a call first needs to know.
        supports: whether the kernel takes a call: a function of the operator's arguments that
            returns a bool. It gets tensors without data: it may read shapes, strides, dtypes,
            devices and plain values, and its answer is kept for all calls with the same ones.
        batch_invariant: whether a row of a batch has the same bits whatever else is in the batch.
        deterministic: whether equal calls give equal bits. If not, calls skip the kernel under
            `torch.use_deterministic_algorithms`.
        tolerance: how far results may be from those of the reference: `(rtol, atol)` by dtype.
        configs: keyword arguments of this kernel alone, such as tile sizes, as a list of dicts. The
            first dict is used.
        lib: the library whose lifetime the registration shares, so that closing it undoes this; by
            default it stays for good.

    Returns:
        `func`; without it, a decorator.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: `func` does not take the operator's arguments; or it is of a provider,
            and has other names or defaults for them.
        ProviderNameError: a `ValueError`: a name that a provider cannot have.
        RuntimeError: a device type that PyTorch does not know.
        NotImplementedError: a provider, for an operator that torchop did not define.
        ValueError: the operator has no argument that could choose the device.
        TypeError: an argument about a provider has the wrong type, or is given without one.

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

    The idea is `torch.library.register_kernel`.
    """
    options: dict[str, Any] = {
        "supported": supported,
        "supports": supports,
        "batch_invariant": batch_invariant,
        "deterministic": deterministic,
        "tolerance": tolerance,
        "configs": configs,
    }
    devices = device_list(device_types)  # also where the function comes later, if it is not this
    if provider is None:
        rule = resolve(op, "register_kernel", lib).rule(KernelRule)
        _refuse_options(rule.definition, options)
        return decorator_or_call(lambda function: rule.register(device_types, function), func)
    return decorator_or_call(
        lambda function: register_provider(op, devices, function, provider, lib, options), func
    )


# Registers the kernel of a provider, given the operator, the device types, the function, the name
# of the provider, the library, and what is said of the kernel. What chooses between kernels puts
# its function here, because it needs the rule of kernels.
register_provider: Any = None


def _refuse_options(op: object, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(register_kernel).parameters
    given = [name for name, value in options.items() if value is not parameters[name].default]
    if given:
        raise TypeError(
            f"{op}: register_kernel takes {given[0]} only for the kernel of a provider. Name the "
            "provider: provider='...'."
        )
