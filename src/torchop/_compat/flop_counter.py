"""FLOP formulas for FlopCounterMode, one for each overload.

PyTorch's registry has only one formula for all overloads of an operator. So torchop registers a
`_Counter` there, which forwards to the formula of the overload in the call.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torchop._compat import import_hooks, operators
from torchop._compat.classes import OpOverload

# `count(args, kwargs, result)` returns the FLOPs of a call.
Count = Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


def add_count(op: OpOverload, count: Count) -> bool:
    """Register an operator's FLOP formula. Return False if other code has registered one."""
    packet, registry = op._overloadpacket, _registry()
    counter = registry.setdefault(packet, _Counter())
    if not isinstance(counter, _Counter):
        return False
    counter.counts = {**counter.counts, op: count}
    return True


def remove_count(op: OpOverload) -> None:
    packet, registry = op._overloadpacket, _registry()
    counter = registry.get(packet)
    if isinstance(counter, _Counter):
        counter.counts = {each: count for each, count in counter.counts.items() if each is not op}
        if not counter.counts:
            del registry[packet]


def has_count(op: OpOverload) -> bool:
    return op._overloadpacket in _registry()


def counted(op: OpOverload, args: Any, kwargs: Any) -> Any:
    """Return the number of operations that FlopCounterMode counts for a call."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        op(*args, **kwargs)
    return counter.get_total_flops()


def on_uncounted_call(report: Callable[[str], None]) -> None:
    """Call `report` with the name of each operator that FlopCounterMode calls without a formula.

    `report` is called once for each overload of the packet, because FlopCounterMode only records
    which packet was called. For an operator without a formula, `FlopCounterMode._count_flops`
    (torch/utils/flop_counter.py) silently counts 0 FLOPs. Since it has no hook, this function wraps
    it.
    """
    reported: set[str] = set()

    def wrap() -> None:
        counter = sys.modules["torch.utils.flop_counter"].FlopCounterMode
        count = getattr(counter, "_count_flops", None)
        if count is None:
            return

        @functools.wraps(count)
        def count_flops(self: Any, packet: Any, *call: Any) -> Any:
            name = packet._qualified_op_name
            if name not in reported and packet not in self.flop_registry:
                reported.add(name)
                for overload in packet.overloads():
                    report(name if overload == "default" else f"{name}.{overload}")
            return count(self, packet, *call)

        counter._count_flops = count_flops

    import_hooks.when_imported("torch.utils.flop_counter", wrap)


def loaded_mode() -> type | None:
    module = sys.modules.get("torch.utils.flop_counter")  # importing it here would log warnings
    return getattr(module, "_FlopCounterMode", None)


def counted_for(op: OpOverload, result_of: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a handler with which FlopCounterMode counts calls to a replacement of `op`.

    The handler uses the called operator's FLOP formula if there is one, and falls back to the FLOP
    formula of `op`. `result_of` converts the called operator's result to a result of `op`.
    """

    def count(mode: Any, called: Any, types: Any, args: Any, kwargs: Any) -> Any:
        result = mode.__torch_dispatch__(called, types, args, kwargs)
        if called._overloadpacket not in mode.counter.flop_registry:
            known = op._overloadpacket
            mode.counter._count_flops(known, result_of(result), args, kwargs or {})
        return result

    return count


def _registry() -> dict[Any, Any]:
    """Return PyTorch's registry, a dict from packets to formulas.

    The hash of an OpOverloadPacket is the hash of its attribute `_op` (torch/_ops.py), which
    PyTorch replaces when an overload is added. The packet can then no longer be found in the
    registry. So if any lookup fails, rebuild the dict by inserting all entries again.
    """
    from torch.utils.flop_counter import flop_registry

    if any(packet not in flop_registry for packet in flop_registry):
        entries = list(flop_registry.items())
        flop_registry.clear()
        flop_registry.update(entries)
    return flop_registry


class _Counter:
    def __init__(self) -> None:
        self.counts: Mapping[OpOverload, Count] = {}

    def __call__(self, *args: Any, out_val: Any = None, **kwargs: Any) -> Any:
        if not self.counts:
            return 0  # all formulas were removed after a mode had copied the registry
        first = next(iter(self.counts))
        op = operators.chosen_overload(first._overloadpacket, args, kwargs)
        if op in self.counts:
            return self.counts[op](args, kwargs, out_val)
        # If this overload has no formula (it may be an out= overload, for example), use the first
        # formula that was registered for the operator.
        names = {argument.name for argument in first._schema.arguments}
        known = {name: kwargs[name] for name in kwargs if name in names}
        return self.counts[first](args, known, out_val)
