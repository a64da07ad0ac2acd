"""FlopCounterMode's registry, with one function for all overloads of a packet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchop._compat import operators
from torchop._compat.classes import OpOverload

# Returns the FLOPs of a call, given the arguments and the result.
Count = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


def add_count(op: OpOverload, count: Count) -> bool:
    """Register an operator's FLOP formula; return False if its packet has a foreign one."""
    packet, registry = op._overloadpacket, _registry()
    counter = registry.setdefault(packet, _Counter())
    if not isinstance(counter, _Counter):
        return False
    counter.counts = {**counter.counts, op: count}
    return True


def remove_count(op: OpOverload) -> None:
    """Undo `add_count`."""
    packet, registry = op._overloadpacket, _registry()
    counter = registry.get(packet)
    if isinstance(counter, _Counter):
        counter.counts = {each: count for each, count in counter.counts.items() if each is not op}
        if not counter.counts:
            del registry[packet]


def loaded_mode() -> type | None:
    """Return the class of FlopCounterMode's dispatch mode, once it is imported."""
    module = sys.modules.get("torch.utils.flop_counter")  # logs warnings when imported
    return getattr(module, "_FlopCounterMode", None)


def counted_for(op: OpOverload, result_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a FlopCounterMode handler for operators called in place of `op`.

    It uses the formula of `op` unless the called operator has another one. `result_of` maps the
    result to the result of `op`.
    """

    def count(mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = mode.__torch_dispatch__(called, types, args, kwargs)
        if called._overloadpacket not in mode.counter.flop_registry:
            known = op._overloadpacket
            mode.counter._count_flops(known, result_of(result), args, kwargs or {})
        return result

    return count


def _registry() -> dict[Any, Any]:
    """Return PyTorch's registry, by packet.

    A new overload changes the hash of the packet, so PyTorch no longer finds the entry. Such
    entries are inserted again.
    """
    from torch.utils.flop_counter import flop_registry

    if any(packet not in flop_registry for packet in flop_registry):
        entries = list(flop_registry.items())
        flop_registry.clear()
        flop_registry.update(entries)
    return flop_registry


class _Counter:
    """A packet's entry in the registry; selects the formula of the called overload."""

    def __init__(self) -> None:
        self.counts: Mapping[OpOverload, Count] = {}

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        if not self.counts:
            return 0  # a mode copied the registry before the last formula was removed
        first = next(iter(self.counts))
        op = operators.chosen_overload(first._overloadpacket, args, kwargs)
        if op in self.counts:
            return self.counts[op](args, kwargs, out_val)
        # An overload without a formula, such as the one with out=, does the same work.
        names = {argument.name for argument in first._schema.arguments}
        known = {name: kwargs[name] for name in kwargs if name in names}
        return self.counts[first](args, known, out_val)
