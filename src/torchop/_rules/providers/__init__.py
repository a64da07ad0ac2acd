"""Providers: named alternatives to an operator's kernel, such as "triton".

The kernel that was registered without a provider name is called the reference kernel. Each call
tries the providers in an order that the operator's author and users can set. The kernel rule only
uses this package for operators with providers, so calls to other operators have no overhead.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.library

from torchop._compat import compilers, libraries
from torchop._core.call import Call
from torchop._core.definition import Definition
from torchop._core.lock import registration_lock
from torchop._core.registry import (
    check_library,
    find_schema,
    op_name,
    own_definition,
    resolve,
)
from torchop._errors import naming, nearest, short_repr
from torchop._rules.kernels import register
from torchop._rules.kernels.devices import DeviceTypes, known_devices
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.providers import priority
from torchop._rules.providers.choice import Choice
from torchop._rules.providers.priority import (
    REFERENCE,
    TUNED,
    checked_order,
    unknown_provider,
)
from torchop._rules.providers.provider import Provider, check_name, make_provider
from torchop._rules.providers.table import NO_PROVIDERS, ProviderTable
from torchop._rules.providers.tuned import Buckets, Tuning
from torchop.extend import OpLike


@compilers.eager_only
def set_priority(op: OpLike, order: Sequence[str], /, *, device_types: DeviceTypes = None) -> None:
    """Set the default order of an operator's providers.

    This method is for the author of an operator. Users can override the order with
    `torchop.set_priority`, the environment variable `TORCHOP_PRIORITY` or a `torchop.priority`
    block, because all of these take precedence.

    Args:
        op: the operator.
        order: the provider names, in the order in which calls try them. The first provider that
            supports a call runs it. If none does, the call falls back to the reference kernel (the
            kernel registered without `provider`). An order may also contain two special names:
            `"reference"` stands for the reference kernel, and `"tuned"` for the kernel that
            `torchop.testing.tune` measured as the fastest.
        device_types: the device types to which the order applies. None means all device types for
            which no separate order was set.

    Raises:
        OperatorGoneError: the operator was replaced or deregistered.
        ProviderError: the operator does not have one of these providers. This error is a
            `ValueError`.
        RuntimeError: PyTorch does not know a device type.
        TypeError: `order` is not a list of names.

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
    definition = resolve(op, "set_priority")
    rule = definition.rule(KernelRule)
    names = checked_order(f"{definition}: set_priority", order)
    with naming(definition):
        devices = known_devices(device_types)
    known = rule.provider_names
    for name in names:
        # `custom_op(..., priority=...)` calls this function before any provider is registered, so
        # unknown names cannot be rejected yet. Instead, the first call of the operator rejects
        # them.
        if known and name not in (REFERENCE, TUNED, *known):
            raise unknown_provider("set_priority", definition, name, known)
    new = {(str(definition.name), device): names for device in devices}
    with registration_lock:
        table = provider_table(rule)
        rule.update(providers=table._replace(orders={**table.orders, **new}))


@compilers.eager_only
def set_tuning(
    op: OpLike, table: str | os.PathLike[str] | None = None, /, *, buckets: Buckets | None = None
) -> None:
    """Set the measurements that the special provider `"tuned"` uses to find the fastest kernel.

    With this method, the author of an operator can measure the kernels in advance and ship the
    results in the package. If users make their own measurements, those take precedence.

    Args:
        op: the operator.
        table: the path of a file in your package that `torchop.testing.tune(..., table=...)` wrote.
        buckets: ranges of tensor sizes that share one measurement, given as the upper bounds of the
            ranges for each dimension of an argument, as in `{"x": {0: [1, 16, 256]}}`. Negative
            dimensions count from the end. By default, the upper bounds are the powers of two.

    Raises:
        OperatorGoneError: the operator was replaced or deregistered.
        TypeError, ValueError: `table` is not a path, or `buckets` does not match the operator's
            arguments.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::times_five", mutates_args=(), priority=["tuned"])
        ... def times_five(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 5
        >>> times_five.set_tuning("tuned.json", buckets={"x": {0: [1, 16, 256]}})
    """
    definition = resolve(op, "set_tuning")
    rule = definition.rule(KernelRule)
    names = [name for names in definition.schema.parameters for name in names]
    for name, bounds in (buckets or {}).items():
        if name not in names:
            raise ValueError(
                f"{definition}: set_tuning has buckets for {short_repr(name)}, but the operator "
                f"takes {', '.join(names)}{nearest(name, names)}."
            )
        if not isinstance(bounds, Mapping) or not all(map(_are_bounds, bounds.items())):
            raise TypeError(
                f"{definition}: set_tuning expects the upper bounds of buckets by dimension, such "
                f"as {{{name!r}: {{0: [1, 16, 256]}}}}, got {short_repr(bounds)} for {name!r}."
            )
    path = None if table is None else Path(table).absolute()
    with registration_lock:
        tuning = Tuning(path, dict(buckets or {}))
        rule.update(providers=provider_table(rule)._replace(tuning=tuning))
        priority.add_rule(rule)


def _are_bounds(item: tuple[Any, Any]) -> bool:
    dim, bounds = item
    return (
        isinstance(dim, int)
        and isinstance(bounds, Sequence)
        and all(isinstance(each, int) and each >= 0 for each in bounds)
    )


def provider_table(rule: KernelRule) -> ProviderTable:
    table: Any = rule.providers
    # Create a separate `reported` set for each operator, because this set is mutated in place.
    return NO_PROVIDERS._replace(reported=set()) if table is None else table


def choice_of_call(
    op: OpLike, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Choice | None, Call]:
    """Return the `Choice` that selects the kernel of a call, and the call's arguments.

    The `Choice` is None if the operator has no providers (alternative kernels). The returned
    arguments include the default values that the caller omitted.
    """
    definition = resolve(op, "tune")
    args, kwargs = definition.schema.fill_defaults(args, kwargs)
    return definition.rule(KernelRule).choice(args, kwargs), (args, kwargs)


def providers_of(op: OpLike) -> list[Provider]:
    name = op_name(op, "providers")
    definition = own_definition(op, name)
    if definition is None:
        return []
    by_device = provider_table(definition.rule(KernelRule)).by_device
    registered = [each for known in by_device.values() for each in known.values()]

    def remaining(provider: Provider) -> Provider:
        """Return the provider without the devices on which another kernel has replaced it."""
        devices = (d for d in provider.devices if by_device[d].get(provider.name) is provider)
        return provider._replace(devices=tuple(devices))

    return [remaining(each) for each in {id(each): each for each in registered}.values()]


def _register(
    op: OpLike,
    device_types: Sequence[str | None],
    function: Callable[..., Any],
    name: str,
    lib: torch.library.Library | None,
    options: Mapping[str, Any],
) -> None:
    definition = _definition(op, lib)
    rule = definition.rule(KernelRule)
    check_name(definition, name, device_types)
    provider = make_provider(definition, name, device_types, function, **options)
    provider_table(rule).warn_of_replacing(definition.name, provider)
    with registration_lock:
        names, install = rule.places(device_types)
        provider = provider._replace(devices=tuple(names))
        providers = provider_table(rule).adding(provider)
        rule.update(install, providers=providers)
        priority.add_rule(rule)
        if lib is not None:
            libraries.on_close(lib, functools.partial(_remove, weakref.ref(rule), provider))


def _remove(rule: weakref.ref[KernelRule], provider: Provider) -> None:
    if (alive := rule()) is not None:
        with registration_lock:
            alive.update(providers=provider_table(alive).without(provider))


def _definition(op: OpLike, lib: torch.library.Library | None) -> Definition:
    name = op_name(op, "register_kernel")
    check_library(f"register_kernel({name})", lib)
    definition = own_definition(op, name)
    if definition is None:
        find_schema(name)  # raises if the operator is not defined
        raise NotImplementedError(
            f"register_kernel({name}): torchop did not define this operator, so it cannot have "
            "providers. Replace the kernel with torchop.Library.impl(..., allow_override=True), "
            "and call the previous one with torchop.get_kernel."
        )
    definition.check_defined()
    return definition


register.register_provider = _register
