"""Priorities: which providers run an operator's calls, in which order.

The order comes from the innermost block that names the operator, else the environment, else
`torchop.set_priority`, else the operator's author. Without an order, the reference runs.
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
from torchop._core.lock import registration_lock
from torchop._errors import ProviderError, nearest, short_repr
from torchop._rules.kernels.devices import DeviceTypes, known_devices
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.naming import is_match, is_name, is_pattern
from torchop.extend import OpName

REFERENCE = "reference"
# In an order: the kernel measured as fastest for the sizes of a call.
TUNED = "tuned"
VARIABLE = "TORCHOP_PRIORITY"

Order: TypeAlias = tuple[str, ...]
# Providers by operator name or pattern; None removes an order.
Orders: TypeAlias = Mapping[str, "Sequence[str] | None"]


class ScopedOrder(NamedTuple):
    """An order for operators matching a name or pattern, on one device type or all (None)."""

    pattern: str
    device: str | None
    names: Order

    def fits(self, name: OpName, device: str | None) -> bool:
        return self.device in (None, device) and is_match(name, self.pattern)

    def specificity(self, name: OpName) -> tuple[bool, int, bool]:
        """Return the sort key of matching orders: exact name, longer pattern, device."""
        return is_name(name, self.pattern), len(self.pattern), self.device is not None


class ActiveOrder(NamedTuple):
    """The order that applies to an operator on a device, and the setting it comes from."""

    names: Order = ()
    by: str = "nobody"
    # Whether it names the operator exactly, so that unknown providers are errors.
    is_exact: bool = False


class Tuner(Protocol):
    """Measures calls inside `torchop.testing.tuning`, given the kernels and the arguments."""

    measure: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Settings:
    """The combined settings of the open blocks of a thread or task.

    Equal blocks share one object, so calls can cache by identity.
    """

    orders: tuple[tuple[ScopedOrder, ...], ...] = ()  # per block, innermost first
    strict: bool = False
    batch_invariant_only: bool = False
    deterministic_only: bool = False
    profile: bool = False
    tuner: Tuner | None = None


_MOST_SETTINGS = 1000
_settings: dict[Any, Settings] = {}
NO_BLOCK = Settings()


class OpenBlocks(NamedTuple):
    """The open blocks of a thread or task, outermost first, and their combined settings."""

    settings: Settings = NO_BLOCK
    blocks: tuple[priority, ...] = ()  # blocks may end in another order than they began
    # the number of leading blocks inherited from the caller of this thread's backward
    inherited: int = 0


_NOTHING_OPEN = OpenBlocks()
# The extension reads this like `_open_blocks`.
open_blocks: ContextVar[OpenBlocks] = ContextVar("torchop_priority", default=_NOTHING_OPEN)


def current() -> Settings:
    """Return the settings that apply in this thread or task, or in the caller of its backward."""
    return _open_blocks().settings


def _open_blocks() -> OpenBlocks:
    found = open_blocks.get()
    return found if found.blocks else autograd.context_of_backward().get(open_blocks, found)


def _settings_of(blocks: tuple[priority, ...]) -> Settings:
    flags: dict[str, Any] = {}
    for block in blocks:
        flags |= {name: flag for name, flag in block._flags.items() if flag is not None}
    orders = tuple(block._orders for block in reversed(blocks) if block._orders)
    key = orders, tuple(sorted(flags.items()))
    if len(_settings) >= _MOST_SETTINGS:
        _settings.clear()  # such programs keep creating new orders
    return _settings.setdefault(key, Settings(orders, **flags)) if blocks else NO_BLOCK


# The orders of `set_priority`; immutable, replaced as a whole.
_process: tuple[ScopedOrder, ...] = ()
_blocks_were_opened = False


# The kernel rules of operators with providers, whose plans depend on orders.
_rules_with_providers: weakref.WeakSet[KernelRule] = weakref.WeakSet()


def add_rule(rule: KernelRule) -> None:
    """Make an operator follow new orders; the registration lock must be held."""
    _rules_with_providers.add(rule)


def rules_with_providers() -> list[KernelRule]:
    """Return the rules of defined operators that have or had providers."""
    with registration_lock:  # other threads may register providers
        return [
            each for each in _rules_with_providers if each.definition.deregistration_reason is None
        ]


def blocks_were_opened() -> bool:
    """Return whether any block was opened in this process, so that calls must check for blocks."""
    return _blocks_were_opened


def active_order(
    name: OpName, device: str | None, author: Mapping[str | None, Order], settings: Settings
) -> ActiveOrder:
    """Return the order for an operator on a device; None means all other devices."""
    for orders, by in (
        *((orders, "torchop.priority") for orders in settings.orders),
        (_of_environment(), VARIABLE),
        (_process, "torchop.set_priority"),
    ):
        fitting = [each for each in orders if each.fits(name, device)]
        if fitting:
            order = max(fitting, key=lambda each: each.specificity(name))
            return ActiveOrder(order.names, by, is_name(name, order.pattern))
    names = author.get(device, author.get(None, ()))
    return ActiveOrder(names, "the operator's author", is_exact=True) if names else ActiveOrder()


def devices_with_orders(name: OpName, author: Mapping[str | None, Order]) -> frozenset[str]:
    """Return the device types for which an operator has separate orders."""
    devices = {order.device for order in _process if is_match(name, order.pattern)}
    return frozenset(device for device in (*devices, *author) if device is not None)


def checked_order(what: str, names: object) -> Order:
    """Validate a user's order, and return it as a tuple."""
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise TypeError(
            f"{what} expects a list of names of providers, such as ['triton'], got "
            f"{short_repr(names)}."
        )
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                f"{what} expects names of providers, strings, got {short_repr(name)} of type "
                f"{type(name).__name__}."
            )
    return tuple(dict.fromkeys(names))


def unknown_provider(what: str, op: object, name: str, known: Collection[str]) -> ProviderError:
    """Return the error for a provider that an operator does not have."""
    listed = ", ".join([REFERENCE, *known])
    return ProviderError(
        f"{what}: {op} has no provider {short_repr(name)}{nearest(name, known)}; it has: {listed}. "
        "Register it: register_kernel(device_types, function, provider=...)."
    )


def _scoped_orders(
    what: str, orders: object, devices: Sequence[str | None] = (None,)
) -> tuple[ScopedOrder, ...]:
    """Validate a user's orders, including the providers' names."""
    if not isinstance(orders, Mapping):
        raise TypeError(
            f"{what} expects a dict of orders by operator, such as {{'mylib::rms_norm': "
            f"['triton']}}, got {short_repr(orders)}."
        )
    scoped = []
    for pattern, names in orders.items():
        pattern = _written(pattern)
        if not isinstance(pattern, str) or not is_pattern(pattern):
            raise ValueError(
                f"{what} expects names of operators, or patterns such as 'mylib::*', got "
                f"{short_repr(pattern)}."
            )
        order = checked_order(f"{what}, {pattern}", () if names is None else names)
        _check_known(what, pattern, order)
        scoped += [ScopedOrder(pattern, device, order) for device in devices]
    return tuple(scoped)


def _written(operator: object) -> Any:
    return getattr(operator, "_qualname", operator)  # a handle


def _check_known(what: str, pattern: str, order: Order) -> None:
    """Raise for providers that no matching operator has, if any operator matches."""
    matching = [r for r in rules_with_providers() if is_match(r.definition.name, pattern)]
    is_name = re.search(r"[*?\[]", pattern) is None
    if not matching and not (is_name and operators.is_registered(*_packet_and_overload(pattern))):
        return  # it may be defined later
    known = sorted({name for each in matching for name in each.provider_names})
    for name in order:
        if name not in (REFERENCE, TUNED, *known):
            raise unknown_provider(what, pattern, name, known)


def _packet_and_overload(name: str) -> tuple[str, str]:
    parsed = OpName.parse(name)
    return parsed.packet, parsed.overload


@functools.cache
def _of_environment() -> tuple[ScopedOrder, ...]:
    orders = []
    for part in filter(None, os.environ.get(VARIABLE, "").split(";")):
        pattern, equals, names = part.partition("=")
        pattern, order = pattern.strip(), tuple(n.strip() for n in names.split(",") if n.strip())
        if not equals or not is_pattern(pattern):
            raise ValueError(
                f"{VARIABLE} expects orders such as 'mylib::rms_norm=vendor,triton;mylib::*=triton'"
                f", got {short_repr(part)}."
            )
        orders.append(ScopedOrder(pattern, None, order))
    return tuple(orders)


def outdate_plans() -> None:
    """Recompile plans that depend on orders; the registration lock must be held."""
    for rule in tuple(_rules_with_providers):
        rule.definition.outdate_plan()


def set_priority(orders: Orders, /, *, device_types: DeviceTypes = None) -> None:
    """Set the process-wide order of operators' providers.

    It replaces the author's order. A block of `torchop.priority` and the variable TORCHOP_PRIORITY
    take precedence. An operator's name takes precedence over a pattern, and a longer pattern over
    a shorter one.

    Args:
        orders: a dict from an operator, by name or by a pattern such as `"mylib::*"`, to names of
            providers. The first one that can run a call runs it, otherwise the kernels registered
            without a provider, named `"reference"`. `"tuned"` means the kernel that
            `torchop.testing.tune` measured as fastest. None removes an order.
        device_types: the device types of the orders; None for all.

    Raises:
        ProviderError: a `ValueError`: no operator of this name or pattern has this provider.
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
    devices = known_devices("set_priority", device_types)
    with registration_lock:
        new = _scoped_orders("set_priority", orders, devices)
        removed = {_written(key) for key, names in orders.items() if names is None}
        places = {(each.pattern, each.device) for each in new}
        others = [each for each in _process if (each.pattern, each.device) not in places]
        _process = (*others, *(each for each in new if each.pattern not in removed))
        outdate_plans()


class priority(Block):  # noqa: N801  (called like a function)
    """Set the order of operators' providers inside a `with` block.

    It applies to calls of this thread or asyncio task; it also decorates functions. Of nested
    blocks, the innermost one that names the operator applies. A backward called in the block
    inherits it, also in PyTorch's GPU threads, except on PyTorch 2.11, where only `set_priority`
    reaches them. A checkpoint recomputes its forward with the order that applies in the backward,
    unless `context_fn` returns a block: `(contextlib.nullcontext(), torchop.priority(...))`. A
    compiled graph calls the operator, which chooses as in eager mode, except that a provider traced
    into the graph (`compile="inline"`) is fixed.

    Args:
        orders: names of providers by operator, as in `set_priority`.
        strict: raise an error if the reference would run although the order does not name it.
        batch_invariant_only: run only the reference and batch-invariant providers.
        deterministic_only: run only the reference and deterministic providers, as under
            `torch.use_deterministic_algorithms`.
        profile: show the provider in profiles, as in `mylib::rms_norm[triton]`.

    Flags that are None keep the value of the enclosing block.

    Raises:
        ProviderError: a `ValueError`: no operator of this name or pattern has this provider.
        ProviderError: in the block, by a call, with `strict=True`.

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
        before = _open_blocks()
        is_first = not open_blocks.get().blocks
        inherited = len(before.blocks) if is_first else before.inherited
        _set_blocks((*before.blocks, self), inherited)

    def __exit__(self, *exception: object) -> None:
        _, blocks, inherited = open_blocks.get()
        if self not in blocks[inherited:]:
            raise RuntimeError(
                "priority() was exited, but it was not entered in this thread or task. Enter and "
                "leave it in one, with a `with` statement."
            )
        innermost = len(blocks) - 1 - blocks[::-1].index(self)
        _set_blocks(blocks[:innermost] + blocks[innermost + 1 :], inherited)


def _set_blocks(blocks: tuple[priority, ...], inherited: int) -> None:
    if len(blocks) > inherited:
        open_blocks.set(OpenBlocks(_settings_of(blocks), blocks, inherited))
    else:  # drop blocks inherited from the caller of a backward
        open_blocks.set(_NOTHING_OPEN)
