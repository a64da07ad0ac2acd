"""The registry of what FlopCounterMode counts: one function for all overloads of a name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchop._compat import operators
from torchop._compat.classes import OpOverload

# Counts the operations of a call, given its arguments and its result.
Count = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


def add_count(op: OpOverload, count: Count) -> bool:
    """Has FlopCounterMode ask `count` about an operator's calls; False if somebody else has."""
    packet, registry = op._overloadpacket, _registry()
    counter = registry.setdefault(packet, _Counter())
    if not isinstance(counter, _Counter):
        return False
    counter.counts = {**counter.counts, op: count}
    return True


def remove_count(op: OpOverload) -> None:
    """Takes `add_count` back."""
    packet, registry = op._overloadpacket, _registry()
    counter = registry.get(packet)
    if isinstance(counter, _Counter):
        counter.counts = {each: count for each, count in counter.counts.items() if each is not op}
        if not counter.counts:
            del registry[packet]


def loaded_mode() -> type | None:
    """The class of the mode that sees the calls to count, as soon as somebody can have one."""
    module = sys.modules.get("torch.utils.flop_counter")  # which logs warnings, so do not import it
    return getattr(module, "_FlopCounterMode", None)


def counted_for(op: OpOverload, result_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Makes the rule for this mode of an operator that is called in the place of `op`.

    Whose formula counts a call, unless the operator has one of its own; `result_of` tells what `op`
    would return.
    """

    def count(mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = mode.__torch_dispatch__(called, types, args, kwargs)
        if called._overloadpacket not in mode.counter.flop_registry:
            known = op._overloadpacket
            mode.counter._count_flops(known, result_of(result), args, kwargs or {})
        return result

    return count


def _registry() -> dict[Any, Any]:
    """PyTorch's registry, by packet.

    Adding an overload to a packet changes the hash of the packet, so PyTorch no longer finds its
    entry. Such entries are inserted again.
    """
    from torch.utils.flop_counter import flop_registry

    if any(packet not in flop_registry for packet in flop_registry):
        entries = list(flop_registry.items())
        flop_registry.clear()
        flop_registry.update(entries)
    return flop_registry


class _Counter:
    """The entry of a packet in the registry, which chooses among its overloads."""

    def __init__(self) -> None:
        self.counts: Mapping[OpOverload, Count] = {}

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        if not self.counts:
            return 0  # a mode copied the registry before the last overload was removed
        first = next(iter(self.counts))
        op = operators.chosen_overload(first._overloadpacket, args, kwargs)
        if op in self.counts:
            return self.counts[op](args, kwargs, out_val)
        # Another overload, such as the one with out=, does the work of one that has a formula.
        names = {argument.name for argument in first._schema.arguments}
        known = {name: kwargs[name] for name in kwargs if name in names}
        return self.counts[first](args, known, out_val)
