"""The table of what operators would gain: with the calls of a recording, measured."""

from __future__ import annotations

from collections.abc import Sequence

import torchop
from torchop._accelerate.accelerate import aligned
from torchop._accelerate.patterns import is_match
from torchop._inspect.record import Recorded
from torchop._schema import naming
from torchop.cli.measure import Measurement, accelerated, measure

_COLUMNS = ("operator", "accelerated", "calls", "native", "before", "after", "reason")


def rows_of(patterns: tuple[str, ...]) -> tuple[torchop.AcceleratedOperator, ...]:
    """The rows of `accelerate` with these patterns, which is undone afterwards."""
    with accelerated(*patterns) as acceleration:
        return acceleration.operators


def rows_of_recorded(
    recorded: Recorded, patterns: tuple[str, ...]
) -> tuple[torchop.AcceleratedOperator, ...]:
    """The rows of the operators in a recording, also of those that are not registered here."""
    names = [op for op in recorded if any(is_match(naming.parse(op), p) for p in patterns)]
    rows = {row.op: row for row in (rows_of(tuple(names)) if names else ())}
    missing = "it is not registered here; import what registers it, with --report"
    return tuple(
        rows.get(op, torchop.AcceleratedOperator(op, False, missing)) for op in sorted(names)
    )


def table(rows: Sequence[torchop.AcceleratedOperator], recorded: Recorded, called: Recorded) -> str:
    """Microseconds for a call of each operator, before and after, and what that saves in all.

    The table counts the calls in `recorded`; those in `called` may be made again, to measure them.
    """
    measurements = measure(
        {row.op: called[row.op] for row in rows if row.accelerated and row.op in called}
    )
    lines: list[tuple[str, ...]] = [_COLUMNS]
    saved = None
    for row in rows:
        calls = recorded.calls(row.op)
        measurement = measurements.get(row.op, Measurement())
        native, before, after, reason, saving = _cells(measurement, calls)
        if saving is not None:
            saved = (saved or 0.0) + saving
        yes = "yes" if row.accelerated else "no"
        lines.append((row.op, yes, str(calls or ""), native, before, after, row.reason or reason))
    if saved is None:
        return aligned(lines)
    return f"{aligned(lines)}\n\nIn the calls that were recorded, this saves {_duration(saved)}."


def _cells(measurement: Measurement, calls: int) -> tuple[str, str, str, str, float | None]:
    """The native calls, before, after and reason of a row, and the microseconds that it saves."""
    native, cost, problem = measurement
    # Calls whose kind was not kept are assumed to be like the others.
    native_calls = round((native or 0.0) * calls)
    shown = "" if native is None else str(native_calls)
    if cost is None:
        return shown, "", "", f"not measured: {problem}" if problem else "", None
    reason = "before and after differ by no more than the noise" if cost.is_noise else ""
    saving = 0.0 if cost.is_noise else native_calls * (cost.before - cost.after)
    return shown, f"{cost.before:.2f}", f"{cost.after:.2f}", reason, saving


def _duration(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= size:
            return f"{microseconds / size:.2f} {unit}"
    return f"{microseconds:.2f} us"
