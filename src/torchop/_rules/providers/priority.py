"""Priority: the order of an operator's providers (named alternatives to its kernel).

Each call tries the providers in this order. The order can be set in four places, listed here from
highest to lowest precedence: `torchop.priority` blocks (the innermost block that names the
operator), the environment variable TORCHOP_PRIORITY, `torchop.set_priority`, and the operator's
author.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeAlias

from torchop._compat import autograd, compilers, operators
from torchop._core.blocks import Block
from torchop._core.definition import NOTHING
from torchop._core.lock import registration_lock
from torchop._errors import ProviderError, naming, nearest, short_repr
from torchop._rules.kernels.devices import DeviceTypes, known_devices
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.naming import is_match, is_name, is_pattern
from torchop.extend import OpName

REFERENCE = "reference"
# In an order of providers (alternative kernels), this name stands for the kernel that was measured
# as the fastest for the tensor sizes of the call.
TUNED = "tuned"
VARIABLE = "TORCHOP_PRIORITY"

Order: TypeAlias = tuple[str, ...]
Orders: TypeAlias = Mapping[str, "Sequence[str] | None"]


# Maps (operator pattern, device type) pairs to orders of providers. The device type None stands for
# all device types.
ScopedOrders: TypeAlias = "Mapping[tuple[str, str | None], Order]"


class ActiveOrder(NamedTuple):
    """The order of providers that applies to an operator on a device.

    Attributes:
        by: the setting that the order comes from, such as "torchop.set_priority", for messages.
        is_exact: whether the setting names exactly this operator instead of a pattern. If so, an
            unknown provider in the order is an error. With a pattern, it is not an error, because
            another operator that matches the pattern may have this provider.
    """

    names: Order = ()
    by: str = "nobody"
    is_exact: bool = False


class Tuner(Protocol):
    """Measures the kernels that can run a call, inside a `torchop.testing.tuning` block."""

    measure: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The combined settings of the `torchop.priority` blocks that are open in a thread or task.

    Caches compare settings by identity, so only create settings with `_settings_of`, which returns
    the same object for equal settings.
    """

    orders: tuple[ScopedOrders, ...] = ()  # one item per block, innermost first
    strict: bool = False
    batch_invariant_only: bool = False
    deterministic_only: bool = False
    profile: bool = False
    tuner: Tuner | None = None


NO_BLOCK = Settings()


class OpenBlocks(NamedTuple):
    """The `torchop.priority` blocks that a thread or task has opened, outermost first.

    `settings` combines the settings of all blocks. If this thread runs a backward pass, `settings`
    also includes the blocks that the caller of the backward pass has opened.
    """

    settings: Settings = NO_BLOCK
    blocks: tuple[priority, ...] = ()


_NOTHING_OPEN = OpenBlocks()
# `open_blocks` in csrc/choice.cpp also reads this variable, so keep it in sync with the function
# `current` below.
open_blocks: ContextVar[OpenBlocks] = ContextVar("torchop_priority", default=_NOTHING_OPEN)


def current() -> Settings:
    found = open_blocks.get()
    return (found if found.blocks else _blocks_of_backward()).settings


def _blocks_of_backward() -> OpenBlocks:
    return autograd.context_of_backward().get(open_blocks, _NOTHING_OPEN)


def _settings_of(blocks: tuple[priority, ...]) -> Settings:
    flags: dict[str, Any] = {}
    for block in blocks:
        flags |= {name: flag for name, flag in block._flags.items() if flag is not None}
    orders = (tuple(block._orders.items()) for block in reversed(blocks) if block._orders)
    return _settings(tuple(orders), tuple(sorted(flags.items())))


@functools.lru_cache(1000)
def _settings(orders: tuple[tuple[Any, ...], ...], flags: tuple[tuple[str, Any], ...]) -> Settings:
    return Settings(tuple(map(dict, orders)), **dict(flags))


# The orders from `torchop.set_priority`. Calls read this mapping without a lock, which is safe
# because it is only ever replaced, never mutated.
_process: ScopedOrders = NOTHING
_blocks_were_opened = False


# The kernel rules of operators that have or had providers (alternative kernels). When an order of
# providers changes, `outdate_plans` invalidates the call plans (compiled rules) of these operators,
# so that later calls follow the new order.
_rules_with_providers: weakref.WeakSet[KernelRule] = weakref.WeakSet()


def add_rule(rule: KernelRule) -> None:
    """The caller must hold `registration_lock`."""
    _rules_with_providers.add(rule)


def rules_with_providers() -> list[KernelRule]:
    with registration_lock:  # other threads may register providers
        return [
            each for each in _rules_with_providers if each.definition.deregistration_reason is None
        ]


def blocks_were_opened() -> bool:
    """Return whether this process has ever opened a `torchop.priority` block.

    Until then, calls need not look for open blocks, so their call plans (compiled rules) contain
    kernels without this check, which makes calls faster.
    """
    return _blocks_were_opened


def active_order(
    name: OpName, device: str | None, author: ScopedOrders, settings: Settings
) -> ActiveOrder:
    """Return the order of providers that applies to an operator on a device.

    A provider is an alternative kernel. If `device` is None, return the order for devices without a
    separate kernel. `author` contains the orders that the operator's author set. If several orders
    from the same source match, an order for exactly this operator takes precedence over a pattern,
    a longer pattern over a shorter one, and an order for the device over an order for all devices.
    """

    def specificity(place: tuple[str, str | None]) -> tuple[bool, int, bool]:
        pattern, device = place
        return is_name(name, pattern), len(pattern), device is not None

    for orders, by in (
        *((orders, "torchop.priority") for orders in settings.orders),
        (_of_environment(), VARIABLE),
        (_process, "torchop.set_priority"),
        (author, "the operator's author"),
    ):
        fitting = [
            (pattern, scope)
            for pattern, scope in orders
            if scope in (None, device) and is_match(name, pattern)
        ]
        if fitting:
            place = max(fitting, key=specificity)
            return ActiveOrder(orders[place], by, is_name(name, place[0]))
    return ActiveOrder()


def devices_with_orders(name: OpName, author: ScopedOrders) -> list[str]:
    places = (*_process, *author)
    return [device for pattern, device in places if device and is_match(name, pattern)]


def checked_order(what: str, names: object) -> Order:
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"{what} expects a list of names of providers, such as ['triton'], got "
            f"{short_repr(names)}."
        )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{what} expects names of providers as strings, got {short_repr(name)} of type "
                f"{type(name).__name__}."
            )
    return tuple(dict.fromkeys(names))


def unknown_provider(what: str, op: object, name: str, known: Collection[str]) -> ProviderError:
    listed = ", ".join([REFERENCE, *known])
    return ProviderError(
        f"{what}: {op} has no provider {short_repr(name)}{nearest(name, known)}; it has: {listed}. "
        "Register it: register_kernel(device_types, function, provider=...)."
    )


def _scoped_orders(
    what: str, orders: object, devices: Sequence[str | None] = (None,)
) -> ScopedOrders:
    if not isinstance(orders, Mapping):
        raise TypeError(
            f"{what} expects a dict of orders by operator, such as {{'mylib::rms_norm': "
            f"['triton']}}, got {short_repr(orders)}."
        )
    scoped = {}
    for pattern, names in orders.items():
        pattern = _written(pattern)
        if not isinstance(pattern, str) or not is_pattern(pattern):
            raise ValueError(
                f"{what} expects names of operators, or patterns such as 'mylib::*', got "
                f"{short_repr(pattern)}."
            )
        order = checked_order(f"{what}, {pattern}", () if names is None else names)
        _check_known(what, pattern, order)
        scoped.update({(pattern, device): order for device in devices})
    return scoped


def _written(operator: object) -> Any:
    # `operator` is a handle (the object that `custom_op` returned) or a name.
    return getattr(operator, "_qualname", operator)


def _check_known(what: str, pattern: str, order: Order) -> None:
    matching = [r for r in rules_with_providers() if is_match(r.definition.name, pattern)]
    is_name = re.search(r"[*?\[]", pattern) is None
    if not matching and not (is_name and _is_registered(OpName.parse(pattern))):
        return  # the operator may be defined later
    known = sorted({name for each in matching for name in each.provider_names})
    for name in order:
        if name not in (REFERENCE, TUNED, *known):
            raise unknown_provider(what, pattern, name, known)


def _is_registered(name: OpName) -> bool:
    return operators.is_registered(name.packet, name.overload)


@functools.cache
def _of_environment() -> ScopedOrders:
    orders: dict[tuple[str, str | None], Order] = {}
    for part in filter(None, os.environ.get(VARIABLE, "").split(";")):
        pattern, equals, names = part.partition("=")
        pattern, order = pattern.strip(), tuple(n.strip() for n in names.split(",") if n.strip())
        if not equals or not is_pattern(pattern):
            raise ValueError(
                f"{VARIABLE} expects orders such as 'mylib::rms_norm=vendor,triton;mylib::*=triton'"
                f", got {short_repr(part)}."
            )
        orders[pattern, None] = order
    return orders


def outdate_plans() -> None:
    """The caller must hold `registration_lock`."""
    for rule in tuple(_rules_with_providers):
        rule.definition.outdate_plan()


def set_priority(orders: Orders, /, *, device_types: DeviceTypes = None) -> None:
    """Set the order of operators' providers, for the whole process.

    A provider is a named alternative to an operator's kernel. The order that you set here takes
    precedence over the order of the operator's author, but the environment variable
    TORCHOP_PRIORITY and `torchop.priority` blocks take precedence over both. If several orders
    match an operator, an order for exactly this operator takes precedence over a pattern, and a
    longer pattern over a shorter one.

    Args:
        orders: a dict from the name of an operator, or a pattern such as `"mylib::*"`, to a list of
            provider names. The first provider in the list that supports a call runs it. If none
            does, the call falls back to the reference kernel (the kernel registered without
            `provider`). A list may also contain two special names: `"reference"` stands for the
            reference kernel, and `"tuned"` for the kernel that `torchop.testing.tune` measured as
            the fastest. Pass None instead of a list to remove an order that was set earlier.
        device_types: the device types for which the orders apply. None means all.

    Raises:
        ProviderError: no operator of this name or pattern has this provider. This error is a
            `ValueError`.
        RuntimeError: PyTorch does not know a device type.
        TypeError, ValueError: `orders` is malformed.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::squared", mutates_args=())
        ... def squared(x: torch.Tensor) -> torch.Tensor:
        ...     return x**2
        >>> @squared.register_kernel("cpu", provider="product")
        ... def _(x):
        ...     return x * x
        >>> torchop.set_priority({"docs::squared": ["product"]})
        >>> torchop.explain(squared, torch.ones(2)).provider
        'product'
        >>> torchop.set_priority({"docs::squared": None})

    Based on `set_priority` of vLLM IR.
    """
    global _process
    with naming("set_priority"):
        devices = known_devices(device_types)
    new = _scoped_orders("set_priority", orders, devices)
    with registration_lock:
        removed = {_written(pattern) for pattern, names in orders.items() if names is None}
        changed = {**_process, **new}
        for place in new:
            if place[0] in removed:
                del changed[place]
        _process = changed
        outdate_plans()


class priority(Block):  # noqa: N801  (called like a function)
    """Set the order of operators' providers, inside a `with` block.

    A provider is a named alternative to an operator's kernel. The block applies to calls in this
    thread or asyncio task, and can also be used as a decorator. If several open blocks name an
    operator, the innermost one takes precedence.

    A backward pass that starts inside the block uses the same order, even in the threads that
    PyTorch starts for GPUs. The exception is PyTorch 2.11, where these threads only follow
    `set_priority`.

    When a checkpoint recomputes the forward pass, it uses the order that is active during the
    backward pass. To use another order for the recomputation, let `context_fn` return
    `(contextlib.nullcontext(), torchop.priority(...))`.

    Operators in a compiled graph follow the order that is active when the graph runs. The exception
    is operators with `compile="inline"`: the compiler inlines their kernels, so the graph contains
    the kernel that was chosen during compilation.

    Args:
        orders: a dict from operators to lists of provider names, as in `set_priority`.
        strict: whether to raise an error if no provider in the order supports a call. Otherwise,
            the call falls back to the reference kernel, even if the order does not contain
            `"reference"`.
        batch_invariant_only: whether to skip all providers that were not registered with
            `batch_invariant=True`. The reference kernel is always allowed.
        deterministic_only: whether to skip all providers that were registered with
            `deterministic=False`, as under `torch.use_deterministic_algorithms`. The reference
            kernel is always allowed.
        profile: whether profiles show the provider of each call, as in `mylib::rms_norm[triton]`.

    A flag that is None is inherited from the enclosing block.

    Raises:
        ProviderError: no operator of this name or pattern has this provider. This error is a
            `ValueError`.
        ProviderError: raised by a call inside the block, if `strict` is set and no provider
            supports the call.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::cubed", mutates_args=())
        ... def cubed(x: torch.Tensor) -> torch.Tensor:
        ...     return x**3
        >>> @cubed.register_kernel("cpu", provider="product", supports=lambda x: x.ndim == 1)
        ... def _(x):
        ...     return x * x * x
        >>> with torchop.priority({"docs::cubed": ["product"]}, strict=True):
        ...     cubed(torch.ones(2, 2))
        Traceback (most recent call last):
        torchop.ProviderError: docs::cubed: no provider of the order of torchop.priority ...

    Based on `set_priority` of vLLM IR.
    """

    def __init__(
        self,
        orders: Orders = {},  # noqa: B006  (it is only read)
        /,
        *,
        strict: bool | None = None,
        batch_invariant_only: bool | None = None,
        deterministic_only: bool | None = None,
        profile: bool | None = None,
    ) -> None:
        compilers.break_graph(
            "torch.compile cannot trace torchop.priority: a compiled graph follows the order "
            "that applies when the graph runs, not one inside of it. Open the block around the "
            "call of the compiled function, or use torchop.set_priority."
        )
        self._flags: dict[str, Any] = {
            "strict": strict,
            "batch_invariant_only": batch_invariant_only,
            "deterministic_only": deterministic_only,
            "profile": profile,
        }
        for name, flag in self._flags.items():
            if not isinstance(flag, bool | None):
                raise TypeError(f"priority: {name} expects a bool or None, got {short_repr(flag)}.")
        self._orders = _scoped_orders("priority", orders)

    def __enter__(self) -> None:
        global _blocks_were_opened
        if not _blocks_were_opened:
            with registration_lock:
                _blocks_were_opened = True
                outdate_plans()
        _set_blocks((*open_blocks.get().blocks, self))

    def __exit__(self, *exception: object) -> None:
        _, blocks = open_blocks.get()
        if self not in blocks:
            raise RuntimeError(
                "priority() was exited, but it was not entered in this thread or task. Enter and "
                "leave it in one, with a `with` statement."
            )
        innermost = len(blocks) - 1 - blocks[::-1].index(self)
        _set_blocks(blocks[:innermost] + blocks[innermost + 1 :])


def _set_blocks(blocks: tuple[priority, ...]) -> None:
    if not blocks:
        open_blocks.set(_NOTHING_OPEN)
        return
    # If a backward pass runs in the thread of its caller, `blocks` already contains the caller's
    # blocks, so do not add them again.
    outer = (each for each in _blocks_of_backward().blocks if each not in blocks)
    open_blocks.set(OpenBlocks(_settings_of((*outer, *blocks)), blocks))
