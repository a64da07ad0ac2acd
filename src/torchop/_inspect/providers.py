"""`providers`: list the alternative kernels of operators, and report whether they can run.

An operator may have kernels from several providers, for example a Triton and a CUDA implementation.
Kernels that were registered without a provider are its reference kernels. Each call runs the first
provider in the priority order that supports the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torchop._accelerate import patterns
from torchop._core.definition import Definition
from torchop._core.registry import registration_site
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.providers import priority, provider_table, providers_of
from torchop._rules.providers.choice import Choice
from torchop._rules.providers.provider import Provider
from torchop._schema.naming import is_match

_OTHER_DEVICES = "it is for other devices"


class Provided(NamedTuple):
    """A kernel of an operator, as listed by `torchop.providers`.

    Attributes:
        op: the name of the operator.
        provider: the name of the provider, or `"reference"` for a kernel without a provider.
        device_types: the device types that the kernel supports. None stands for all device types
            that have no separate kernel.
        supported: whether the kernel can run in this process.
        reason: why the kernel cannot run in this process. Empty if it can.
        rank: the provider's position, counted from 1, in the priority order that applies to the
            first of `device_types`. None if the order does not contain the provider.
        batch_invariant: whether the kernel was registered as batch-invariant.
        deterministic: whether the kernel was registered as deterministic. Always True for the
            reference.
        where: the file and line of the kernel's function.

    Example:
        >>> import torchop
        >>> sorted(kernel.op for kernel in torchop.providers("docs::no_such_operator"))
        []
    """

    op: str
    provider: str
    device_types: tuple[str | None, ...]
    supported: bool
    reason: str
    rank: int | None
    batch_invariant: bool
    deterministic: bool
    where: str


def providers(*ops: str) -> list[Provided]:
    """List the kernels of operators that have several providers.

    To find out which kernels can run, this calls the functions that were registered as `supported`.

    Args:
        ops: names of operators, or patterns such as `"mylib::*"`; by default, all operators.

    Raises:
        ValueError: no operator's name can match a pattern.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::quadrupled", mutates_args=())
        ... def quadrupled(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 4
        >>> @quadrupled.register_kernel("cpu", provider="vendor", supported=False)
        ... def _(x):
        ...     return x + x + x + x
        >>> for kernel in torchop.providers("docs::quadrupled"):
        ...     print(kernel.provider, kernel.device_types, kernel.supported, kernel.reason)
        reference (None,) True
        vendor ('cpu',) False it is registered with supported=False
    """
    wanted = ops or ("*",)
    patterns.check_patterns("providers", wanted)
    return [
        kernel
        for rule in sorted(priority.rules_with_providers(), key=lambda r: r.definition.name)
        if any(is_match(rule.definition.name, pattern) for pattern in wanted)
        for kernel in _kernels_of(rule)
    ]


def in_order(definition: Definition, choice: Choice, reasons: Mapping[str, str]) -> tuple[str, ...]:
    """Return a line about each provider of an operator, in the order in which a call tries them.

    `reasons` maps providers to the texts that `Choice.explain` returned for the call.
    """
    found, settings = list(_registered(definition.rule(KernelRule))), priority.current()
    order = priority.active_order(choice.op, choice.device, choice.table.orders, settings).names
    references = [each for each in found if each.provider is None]
    of_device = [each for each in references if choice.device in each.devices]
    of_device = of_device or [each for each in references if None in each.devices]
    lines = []
    for each in (*found[len(references) :], *references):
        why = reasons.get(each.name, _OTHER_DEVICES)
        devices = ", ".join(device or "every device" for device in each.devices)
        if each.provider is None and each not in of_device:
            why = _OTHER_DEVICES
        lines.append((each.name, f"{each.name} ({devices}): {why} ({each.where})"))
    # The priority order may also contain providers that were removed, and "tuned", which stands for
    # the kernel that was measured as the fastest. `reasons` says why the call skips these entries,
    # so add a line for each of them.
    names = {name for name, _ in lines}
    lines += [(name, f"{name}: {why}") for name, why in reasons.items() if name not in names]
    lines.sort(key=lambda line: order.index(line[0]) if line[0] in order else len(order))
    return tuple(
        f"{order.index(name) + 1}. {text}" if name in order else text for name, text in lines
    )


class _Registered(NamedTuple):
    """One registration: the reference kernel for some devices, or a provider.

    A provider, such as "triton", is a named source of kernels. The reference kernel was registered
    without a provider.
    """

    name: str
    devices: tuple[str | None, ...]
    where: str
    provider: Provider | None  # None for the reference


def _registered(rule: KernelRule) -> Iterator[_Registered]:
    definition = rule.definition
    functions = {d: inspect.unwrap(f) for d, f in rule.functions.items()}
    for function in dict.fromkeys(functions.values()):
        devices = tuple(d for d, f in functions.items() if f is function)
        yield _Registered(priority.REFERENCE, devices, _place(function, definition), None)
    for provider in providers_of(str(definition)):
        yield _Registered(provider.name, provider.devices, str(provider.site), provider)


def _kernels_of(rule: KernelRule) -> Iterator[Provided]:
    definition = rule.definition
    op, table = str(definition), provider_table(rule)
    if not table.names:
        return

    def rank(name: str, device: str | None) -> int | None:
        order = priority.active_order(definition.name, device, table.orders, priority.current())
        return order.names.index(name) + 1 if name in order.names else None

    for name, devices, where, provider in _registered(rule):
        reason = None if provider is None else provider.why_unsupported()
        yield Provided(
            op,
            name,
            devices,
            reason is None,
            reason or "",
            rank(name, devices[0]),
            provider is not None and provider.batch_invariant,
            provider is None or provider.deterministic,
            where,
        )


def _place(function: Any, definition: Definition) -> str:
    code = getattr(function, "__code__", None)
    return (
        registration_site(definition.name)
        if code is None
        else f"{code.co_filename}:{code.co_firstlineno}"
    )
