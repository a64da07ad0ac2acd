"""Registering kernels: the reference, and those of providers beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.library

from torchop._core.definition import Definition
from torchop._core.library import check_library
from torchop._core.registry import OpLike, find_schema, op_name, own_definition, resolve
from torchop._errors import OperatorGoneError
from torchop._rules.kernels.devices import DeviceTypes, device_list
from torchop._rules.kernels.priority import REFERENCE, checked_order, unknown_provider
from torchop._rules.kernels.providers import (
    Configs,
    Supported,
    Tolerance,
    check_name,
    make_provider,
)
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.callables import Function, Lambda, decorator_or_call


def register_kernel(
    op: OpLike,
    device_types: DeviceTypes,
    func: Function | Lambda | None = None,
    /,
    *,
    provider: str | None = None,
    supported: Supported = True,
    supports: Callable[..., bool] | None = None,
    batch_invariant: bool = False,
    deterministic: bool = True,
    tolerance: Tolerance | None = None,
    configs: Configs = (),
    lib: torch.library.Library | None = None,
) -> Function:
    """Registers the implementation of an operator for some device types.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        device_types: `"cpu"`, `"cuda"`, any other device type, a sequence of them, or None (also
            written `"default"`) for all devices without their own kernel. For an operator that
            `custom_op` did not define, also a dispatch key.
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
        deterministic: whether equal calls have equal bits. One that does not is passed by under
            `torch.use_deterministic_algorithms`.
        tolerance: how far results may be from those of the reference: `(rtol, atol)` by dtype.
        configs: keyword arguments of this kernel alone, such as tile sizes, as a list of dicts. The
            first dict is used.
        lib: the library whose lifetime the registration shares; by default it stays for good.

    Returns:
        `func`; without it, a decorator.

    Raises:
        OperatorNotFoundError: the operator is not defined.
        RuleSignatureError: `func` does not take the operator's arguments; or it is of a provider,
            and has other names or defaults for them.
        ProviderNameError: a `ValueError`: a name that a provider cannot have.
        RuntimeError: a device type that PyTorch does not know.
        ValueError: the operator has no argument that could choose the device.
        TypeError: what is said of the provider has the wrong type, or there is no provider.

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
        _refuse_options(rule.operator, options)
        return decorator_or_call(lambda function: rule.register(device_types, function), func)
    definition = _definition(op, lib)
    check_name(definition, provider, devices)

    def register(function: Callable[..., Any]) -> None:
        made = make_provider(definition, provider, devices, function, **options)
        definition.rule(KernelRule).register_provider(made, lib)

    return decorator_or_call(register, func)


def _refuse_options(op: object, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(register_kernel).parameters
    given = [name for name, value in options.items() if value is not parameters[name].default]
    if given:
        raise TypeError(
            f"{op}: register_kernel got {given[0]} without a provider, whose kernels it is about. "
            "Add a name for it: provider='...'."
        )


def _definition(op: OpLike, lib: torch.library.Library | None) -> Definition:
    """The definition of one of our operators, also where another library holds the registration."""
    name = op_name(op, "register_kernel")
    check_library(f"register_kernel({name})", lib)
    definition = own_definition(op, name)
    if definition is None:
        find_schema(name)  # raises where there is no operator
        raise NotImplementedError(
            f"register_kernel({name}): provider is for operators that torchop's custom_op defines, "
            "which this one is not. Leave provider out, and the kernel replaces the one there is."
        )
    definition.check_defined()
    if lib is not None and lib.m is None:
        raise OperatorGoneError(
            f"register_kernel({name}): the Library object passed as lib has been destroyed: "
            "nothing can be registered through it any more."
        )
    return definition


def set_priority(op: OpLike, order: Sequence[str], /, *, device_types: DeviceTypes = None) -> None:
    """Sets the order in which calls of an operator ask its providers, as its author.

    Orders of the process, of the environment and of blocks count before it: `torchop.set_priority`
    and `torchop.priority`.

    Args:
        op: the operator.
        order: names of its providers. The first one runs that can; the kernels that were registered
            without a provider, `"reference"`, run where none can.
        device_types: the device types for which the order is; None for those without their own.

    Raises:
        OperatorGoneError: the operator was replaced or closed.
        ProviderNameError: a `ValueError`: the operator does not have one of these providers.
        TypeError: something else than names.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::tripled", mutates_args=())
        ... def tripled(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 3
        >>> @tripled.register_kernel("cpu", provider="sum")
        ... def _(x):
        ...     return x + x + x
        >>> tripled.set_priority(["sum"])
        >>> torchop.explain(tripled, torch.ones(2)).provider
        'sum'
    """
    rule = resolve(op, "set_priority").rule(KernelRule)
    names = checked_order(f"{rule.operator}: set_priority", order)
    for name in names:
        if name != REFERENCE and name not in rule.provider_names:
            raise unknown_provider("set_priority", rule.operator, name, rule.provider_names)
    rule.set_priority(names, device_list(device_types))
