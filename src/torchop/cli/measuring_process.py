"""Measuring each operator in a process of its own, because its kernel may crash or hang.

A kernel that does not check an index, for example, writes out of bounds when it gets tensors of
ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from torchop._compat import operators
from torchop._inspect.registrant import modules_of
from torchop._schema import naming
from torchop.cli.child_process import START_LIMIT, Child, ChildError, preload
from torchop.cli.measure import (
    Cost,
    Kinds,
    NotMeasuredError,
    accelerated,
    first_line,
    is_on_accelerator,
    measured,
    native_share,
)

_LIMIT = 60.0  # seconds, for all calls of an operator
_NOT_REGISTERED = "no module registers it in a process of its own"


class Measurement(NamedTuple):
    """What was measured of an operator."""

    native: float | None = None  # the share of the recorded calls that would be; None if unknown
    cost: Cost | None = None  # of a call
    problem: str = ""  # why there is no cost


def measure(recorded: Mapping[str, Kinds]) -> dict[str, Measurement]:
    """Measures operators, each in a process of its own."""
    modules = {op: modules_of(naming.parse(op)) for op in recorded}
    preload([__name__, *(name for names in modules.values() for name in names)])
    return {op: _measure(op, kinds, modules[op]) for op, kinds in recorded.items()}


def _measure(op: str, kinds: Kinds, modules: list[str]) -> Measurement:
    measurement = Measurement(problem=_NOT_REGISTERED)
    if modules:
        measurement = _measure_in_child("forkserver", op, kinds, modules)
    # A fork of a program that uses an accelerator cannot use it.
    if measurement.problem != _NOT_REGISTERED or any(is_on_accelerator(call) for call, _ in kinds):
        return measurement
    return _measure_in_child("fork", op, kinds, [])


def _measure_in_child(
    method: Literal["forkserver", "fork"], op: str, kinds: Kinds, modules: list[str]
) -> Measurement:
    try:
        child = Child(method, _measurements, (op, kinds, modules))
    except OSError as error:
        return Measurement(problem=f"no process can be started for it ({first_line(error)})")
    measurement = Measurement()
    activity = "importing what registers it"
    with child:
        try:
            for limit in (START_LIMIT, _LIMIT):
                measurement = child.receive(limit)
                if measurement.problem:
                    break
                activity = "a call with tensors of ones"
        except ChildError as error:
            return measurement._replace(problem=f"{activity} {error}")
        return measurement


def _measurements(op: str, kinds: Kinds, modules: list[str]) -> Iterator[Measurement]:
    """Yields what is known before the first call, and after the last one.

    The first result counts if a call crashes or hangs.
    """
    try:
        for module in modules:
            importlib.import_module(module)
    except Exception as error:
        yield Measurement(problem=f"{module} cannot be imported: {first_line(error)}")
        return
    name = naming.parse(op)
    if not operators.is_registered(name.packet, name.overload):
        yield Measurement(problem=_NOT_REGISTERED)
        return
    with accelerated(op):
        native = native_share(op, kinds)
        yield Measurement(native)
        try:
            cost = measured(op, kinds)
        except NotMeasuredError as error:
            yield Measurement(native, problem=str(error))
        else:
            yield Measurement(native_share(op, kinds), cost)
