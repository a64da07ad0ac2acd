"""The table of what operators would gain: with the calls of a recording, measured."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import torchop
from torchop._accelerate.accelerate import aligned
from torchop._accelerate.patterns import is_match
from torchop._compat import effects, torch_ops
from torchop._core.registry import find_schema
from torchop._errors import NothingToAccelerateWarning
from torchop._inspect.call_record import CallRecord, TensorRecord, TypeRecord
from torchop._inspect.record import Recorded
from torchop._native.extension import api
from torchop._schema import naming
from torchop.testing._samples import inside_a_graph

_ROUNDS, _CALLS = 21, 50
_SECONDS = 1.0  # for one operator, unless a call takes longer
_LARGEST = 2**30  # bytes of the tensors of a call
_COLUMNS = ("operator", "accelerated", "calls", "before", "after", "reason")


class _Cost(NamedTuple):
    """Microseconds for a call, through the dispatcher and natively."""

    before: float
    after: float


class _NotMeasuredError(Exception):
    """The reason why there is no time for an operator."""


def rows_of(patterns: tuple[str, ...]) -> tuple[torchop.AcceleratedOperator, ...]:
    """What `accelerate` would do, and undoes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToAccelerateWarning)
        with torchop.accelerate(*patterns) as acceleration:
            # Without the extension, no operator would be accelerated.
            while api.status().state in ("building", "found"):
                time.sleep(0.05)
            return acceleration.operators


def rows_of_recorded(
    recorded: Recorded, patterns: tuple[str, ...]
) -> tuple[torchop.AcceleratedOperator, ...]:
    """The same for the operators in a recording, those that are not registered here included."""
    names = [op for op in recorded if any(is_match(naming.parse(op), p) for p in patterns)]
    found = {row.op: row for row in (rows_of(tuple(names)) if names else ())}
    missing = "it is not registered here; import what registers it, with --report"
    return tuple(
        found.get(op, torchop.AcceleratedOperator(op, False, missing)) for op in sorted(names)
    )


def table(rows: Iterable[torchop.AcceleratedOperator], recorded: Recorded) -> str:
    """Microseconds for a call of each operator, before and after, and what that saves in all."""
    lines: list[tuple[str, ...]] = [_COLUMNS]
    saved = None
    for row in rows:
        calls = recorded.calls(row.op)
        before = after = ""
        reason = row.reason
        if row.accelerated and calls:
            try:
                cost = _measured(row.op, recorded[row.op])
            except _NotMeasuredError as error:
                reason = f"not measured: {error}"
            else:
                before, after = f"{cost.before:.2f}", f"{cost.after:.2f}"
                saved = (saved or 0.0) + calls * (cost.before - cost.after)
        yes = "yes" if row.accelerated else "no"
        lines.append((row.op, yes, str(calls or ""), before, after, reason))
    if saved is None:
        return aligned(lines)
    return f"{aligned(lines)}\n\nIn the calls that were recorded, this saves {_duration(saved)}."


def _duration(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if abs(microseconds) >= size:
            return f"{microseconds / size:.2f} {unit}"
    return f"{microseconds:.2f} us"


def _measured(op: str, kinds: list[tuple[CallRecord, int]]) -> _Cost:
    """The cost of the most frequent kind of call that can be measured."""
    if effects.effect_of(op) is not None:
        raise _NotMeasuredError("it has an effect, which a measurement would repeat")
    problem = None
    for call, _ in kinds:
        try:
            return _measured_call(op, call)
        except _NotMeasuredError as error:
            problem = problem or error
    raise problem or _NotMeasuredError("no kind of call was kept")


def _measured_call(op: str, call: CallRecord) -> _Cost:
    _check(call)
    name = naming.parse(op)
    function = torch_ops.lookup_overload(*name)
    schema = find_schema(name)

    def example() -> tuple[Any, Any]:
        made = call.example()
        assert made is not None  # as was checked
        return inside_a_graph(schema, *made)

    try:
        args, kwargs = example()
    except Exception as error:
        raise _NotMeasuredError(f"its tensors cannot be made here ({_first_line(error)})") from None
    # What is written over and over may overflow, which takes another time.
    fresh = example if schema.mutated else lambda: (args, kwargs)
    with torchop.accelerate(op):
        try:
            # The first call of all starts threads, compiles kernels and makes the plan.
            first = min(_time(function, args, kwargs, 1) for _ in range(3))
        except Exception as error:  # a tensor of ones may be no index, or no permutation
            raise _NotMeasuredError(
                f"a call with tensors of ones raises {_first_line(error)}"
            ) from None
        return _compared(function, fresh, first)


def _compared(
    function: Callable[..., Any], fresh: Callable[[], tuple[Any, Any]], first: float
) -> _Cost:
    """Both costs, taking turns, so that what slows the machine down slows both.

    Args:
        function: the overload.
        fresh: makes its arguments.
        first: seconds for a call, roughly.
    """
    calls = max(1, min(_CALLS, int(_SECONDS / _ROUNDS / 2 / first)))
    rounds = max(3, min(_ROUNDS, int(_SECONDS / 2 / first / calls)))
    after, before = [], []
    for _ in range(rounds):
        after.append(_time(function, *fresh(), calls))
        with torchop.native.disabled():
            before.append(_time(function, *fresh(), calls))
    # The least, as in timeit: what is above it, other processes took.
    return _Cost(min(before) * 1e6, min(after) * 1e6)


def _check(call: CallRecord) -> None:
    """Raises _NotMeasuredError where no example can be made, or only with too much memory."""
    tensors = []
    for part in call.parts():
        if isinstance(part, TypeRecord):
            raise _NotMeasuredError(f"no example can be made of an argument: {part.name}")
        if isinstance(part, TensorRecord):
            tensors.append(part)
    for device in {tensor.device for tensor in tensors}:
        if not _is_here(torch.device(device)):
            raise _NotMeasuredError(f"its tensors were on {device}, which is not here")
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if nbytes > _LARGEST:
        raise _NotMeasuredError(
            f"its tensors take {nbytes / 2**30:.1f} GiB, more than {_LARGEST / 2**30:.0f} GiB"
        )


def _is_here(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    with contextlib.suppress(Exception):  # there is no such backend in this PyTorch
        module = torch.get_device_module(device.type)
        return bool(module.is_available() and (device.index or 0) < module.device_count())
    return False


def _first_line(error: Exception) -> str:
    text = str(error).strip().partition("\n")[0]
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def _time(function: Callable[..., Any], args: Any, kwargs: Any, calls: int) -> float:
    """Seconds for a call; on an accelerator, which goes on by itself, for starting it."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function(*args, **kwargs)
    return (time.perf_counter() - start) / calls


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
