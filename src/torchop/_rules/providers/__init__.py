"""Kernels of several providers for one operator and device, and the order in which calls ask them.

Calls of an operator without providers pay nothing for it: the rule of kernels asks what is here
when it compiles a plan, and only if the operator has providers.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.library

from torchop._compat import libraries
from torchop._core.call import Call, tensors_in, values_by_name
from torchop._core.definition import Definition
from torchop._core.library import check_library
from torchop._core.lock import registration_lock
from torchop._core.registry import find_schema, op_name, own_definition, resolve
from torchop._errors import nearest, short_repr
from torchop._rules.kernels import backend_select, register
from torchop._rules.kernels.devices import DeviceTypes, known_devices
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.providers import priority
from torchop._rules.providers.candidates import DeviceKernels
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
from torchop.extend import OpLike, Schema


def set_priority(op: OpLike, order: Sequence[str], /, *, device_types: DeviceTypes = None) -> None:
    """Sets the order in which calls of an operator ask its providers, on behalf of its author.

    An order of `torchop.set_priority`, of `TORCHOP_PRIORITY` or of a block of `torchop.priority`
    takes precedence over it.

    Args:
        op: the operator.
        order: names of its providers, of which the first that can run a call does. If none can, the
            kernels that were registered without a provider run, which are named `"reference"`.
            `"tuned"` stands for the provider that was measured as the fastest (`torchop.tune`).
        device_types: the device types that the order is for; None for all without one of their own.

    Raises:
        OperatorGoneError: the operator was replaced or closed.
        ProviderNameError: a `ValueError`: the operator does not have one of these providers.
        RuntimeError: a device type that PyTorch does not know.
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
    devices = known_devices(definition, device_types)
    known = rule.provider_names
    for name in names:
        # A definition names providers that come later; if they do not, the first call says so.
        if known and name not in (REFERENCE, TUNED, *known):
            raise unknown_provider("set_priority", definition, name, known)
    with registration_lock:
        rule.update(providers=provider_table(rule).ordered(names, devices))


def set_tuning(
    op: OpLike, table: str | os.PathLike[str] | None = None, /, *, buckets: Buckets | None = None
) -> None:
    """Sets the measurements that calls of an operator follow, as its author.

    Calls ask for them where `"tuned"` stands in the order of providers. What the user of the
    operator measured counts before.

    Args:
        op: the operator.
        table: the file that `torchop.tune(..., table=...)` wrote, and that your package ships.
        buckets: by argument and dimension, the upper bounds of the buckets that its sizes are put
            into when something is measured, as in `{"x": {0: [1, 16, 256]}}`. A negative dimension
            counts from the end. Sizes without bounds are put into those of powers of two.

    Raises:
        OperatorGoneError: the operator was replaced or closed.
        TypeError, ValueError: no path, or buckets of something that the operator does not have.

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
    """The providers of an operator, and the orders of its author."""
    table: Any = rule.providers
    # With a set of its own for what is reported, which is the one thing in it that changes.
    return NO_PROVIDERS._replace(reported=set()) if table is None else table


def choice_of_call(
    definition: Definition, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Choice | None, tuple[Any, ...], dict[str, Any]]:
    """What chooses the kernel of a call, None without providers, and all arguments it gets."""
    schema = definition.schema
    arguments, keywords = every_argument(schema, args, kwargs)
    device = backend_select.requested_device(schema, args, dict(kwargs))
    tensors = tensors_in((*arguments, *keywords.values()))
    device = device or next((tensor.device.type for tensor in tensors), "cpu")
    return definition.rule(KernelRule).choice(device), arguments, keywords


def every_argument(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    """The arguments of a call as a kernel gets them: by position, with the defaults."""
    values = values_by_name(schema, args, kwargs)
    positional = tuple(values.get(a.name, a.default) for a in schema.positional)
    return positional, {a.name: values.get(a.name, a.default) for a in schema.keyword_only}


def kernels_of_call(
    op: OpLike, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[DeviceKernels | None, Call]:
    """The kernels that could run a call, None without providers, and all arguments they get."""
    definition = resolve(op, "tune")
    choice, args, kwargs = choice_of_call(definition, args, kwargs)
    return None if choice is None else choice.kernels, (args, kwargs)


def providers_of(op: OpLike) -> list[Provider]:
    """The providers of an operator, in the order in which they were registered."""
    name = op_name(op, "providers")
    definition = own_definition(op, name)
    if definition is None:
        return []
    by_device = provider_table(definition.rule(KernelRule)).by_device
    registered = [each for known in by_device.values() for each in known.values()]
    return list({id(each): each for each in registered}.values())


def _register(
    op: OpLike,
    device_types: Sequence[str | None],
    function: Callable[..., Any],
    name: str,
    lib: torch.library.Library | None,
    options: Mapping[str, Any],
) -> None:
    """Registers the kernel of a provider, which goes with a library if there is one."""
    definition = _definition(op, lib)
    rule = definition.rule(KernelRule)
    check_name(definition, name, device_types)
    provider = make_provider(definition, name, device_types, function, **options)
    with registration_lock:
        names, install = rule.places(device_types)
        provider = provider._replace(devices=tuple(names))
        providers = provider_table(rule).adding(definition.name, provider)
        rule.update(install, providers=providers)
        priority.add_rule(rule)
        if lib is not None:
            libraries.on_close(lib, functools.partial(_remove, weakref.ref(rule), provider))


def _remove(rule: weakref.ref[KernelRule], provider: Provider) -> None:
    if (alive := rule()) is not None:
        with registration_lock:
            alive.update(providers=provider_table(alive).without(provider))


def _definition(op: OpLike, lib: torch.library.Library | None) -> Definition:
    """What holds the providers of an operator, also where a library holds the registration."""
    name = op_name(op, "register_kernel")
    check_library(f"register_kernel({name})", lib)
    definition = own_definition(op, name)
    if definition is None:
        find_schema(name)  # raises where there is no operator
        raise NotImplementedError(
            f"register_kernel({name}): torchop did not define this operator, so it cannot have "
            "providers. Replace its kernel with torchop.Library.impl(..., allow_override=True), "
            "and call the one that was there with torchop.get_kernel."
        )
    definition.check_defined()
    return definition


register.register_provider = _register
