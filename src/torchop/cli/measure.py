"""Measure how long a call to an operator takes, both with the dispatcher and without it.

Each operator runs in a separate process, because a kernel may crash or hang. For example, all
tensors in the measured calls contain ones, and a kernel that does not check its indices may write
out of bounds for index 1.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import click
import torch

import torchop
from torchop import NothingToAccelerateWarning
from torchop._inspect import call_record
from torchop._inspect.registrant import modules_of
from torchop.cli.child_process import ChildError, answers_of, first_line, preload
from torchop.extend import Operator, OpName
from torchop.native import NativeUnavailableError
from torchop.testing import CallRecord, TensorRecord, TypeRecord
from torchop.testing._samples import inside_a_graph
from torchop.testing._timing import Timing, timed, way

_SECONDS = 0.5  # how long each way of calling is measured, unless a single call takes longer
_LIMIT = 60.0  # the time limit for all calls to an operator, in seconds
_LARGEST = 2**30  # the maximum size of a call's tensors, in bytes
_NOT_REGISTERED = "no module registers it in a separate process"

Call = tuple[tuple[Any, ...], dict[str, Any]]
# The recorded calls to an operator: the arguments of each distinct call, and how often it was made,
# with the most frequent call first.
Kinds = list[tuple[CallRecord, int]]


class Cost(NamedTuple):
    """The time of a call in microseconds."""

    before: float  # for a call through the dispatcher
    after: float  # for a native call
    noise: float  # the median round minus the fastest round, of the faster way of calling

    @property
    def is_noise(self) -> bool:
        return abs(self.before - self.after) <= self.noise


class Measurement(NamedTuple):
    native: float | None = None  # the share of recorded calls that would be native, if known
    cost: Cost | None = None  # the time of a call, if known
    problem: str = ""  # the reason if the time is unknown


def measure(recorded: Mapping[str, Kinds]) -> dict[str, Measurement]:
    modules = {op: modules_of(OpName.parse(op)) for op in recorded}
    preload([__name__, *(name for names in modules.values() for name in names)])
    return {op: _measure(op, kinds, modules[op]) for op, kinds in recorded.items()}


def _measure(op: str, kinds: Kinds, modules: list[str]) -> Measurement:
    methods: list[Literal["forkserver", "fork"]] = ["forkserver"] if modules else []
    # A forked process cannot use an accelerator that the parent uses. So fork this process only if
    # the recorded calls need no accelerator.
    if not any(_is_on_accelerator(call) for call, _ in kinds):
        methods.append("fork")
    measurement = Measurement(problem=_NOT_REGISTERED)
    for method in methods:
        if measurement.problem != _NOT_REGISTERED:
            break
        measurement = Measurement()
        try:
            with answers_of(measurements, (op, kinds), _LIMIT, modules, method=method) as messages:
                for answer in messages:
                    measurement = answer
        except (ChildError, click.ClickException) as error:
            measurement = measurement._replace(problem=str(error))
    return measurement


def measurements(op: str, kinds: Kinds) -> Iterator[Measurement | str]:
    """Yield a preliminary result without the time of a call, and then the complete result.

    If a call crashes or hangs, the parent process falls back to the preliminary result.
    """
    operator = Operator(op, "measure")
    if not operator.exists:
        raise click.ClickException(_NOT_REGISTERED)
    with accelerated(op):
        yield Measurement(_native_share(operator, kinds))
        yield "a call with tensors of ones"
        cost = _cost(operator, kinds)
        yield Measurement(_native_share(operator, kinds), cost)


@contextlib.contextmanager
def accelerated(*patterns: str) -> Iterator[torchop.Acceleration]:
    """Accelerate operators that match `patterns` in the block, if the C++ extension loads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToAccelerateWarning)
        acceleration = torchop.accelerate(*patterns)
    with acceleration:
        with contextlib.suppress(NativeUnavailableError):  # the table will show the reason
            torchop.native.wait()
        yield acceleration


def _native_share(operator: Operator, kinds: Kinds) -> float | None:
    """Return the share of recorded calls that would bypass the dispatcher, or None if unknown.

    The operator must be accelerated. This function does not call the operator itself: it passes the
    recorded calls to `torchop.explain`, with tensors of one element.
    """
    native = total = 0
    for call, count in kinds:
        with contextlib.suppress(Exception):  # the tensors cannot be created on this machine
            example = CallRecord(*call_record.mapped(call, _without_dimensions)).example()
            if example is not None:
                args, kwargs = inside_a_graph(operator.schema, *example)
                native += count * torchop.explain(operator.overload, *args, **kwargs).native
            total += count
    return native / total if total else None


def _without_dimensions(part: Any) -> Any:
    return part._replace(shape=(), stride=None) if isinstance(part, TensorRecord) else part


def _cost(operator: Operator, kinds: Kinds) -> Cost:
    """Return the time of the most frequent call that can be measured."""
    if operator.effect is not None:
        raise click.ClickException("it has an effect, so measuring would repeat it")
    problem: click.ClickException | None = None
    for call, _ in kinds:
        try:
            return _cost_of_call(operator, call)
        except click.ClickException as error:
            problem = problem or error
    raise problem or click.ClickException("no kind of call was recorded")


def _cost_of_call(operator: Operator, call: CallRecord) -> Cost:
    _check(call)
    try:
        example = call.example()
    except Exception as error:
        problem = f"its tensors cannot be created here ({first_line(error)})"
        raise click.ClickException(problem) from None
    assert example is not None  # checked by `_check`
    called = operator.overload, operator.schema, example
    ways = {
        "before": way(*called, torchop.native.disabled),
        "after": way(*called, contextlib.nullcontext),
    }
    before, after = map(_working, timed(ways, example, _SECONDS).values())
    # Other processes on the machine can only slow down a measurement. The faster of the two
    # measurements was therefore disturbed less, so its noise is the better estimate.
    return Cost(before.best, after.best, min(before, after).noise)


def _working(timing: Timing | Exception) -> Timing:
    if isinstance(timing, Timing):
        return timing
    # Mention that all tensors held ones, because this may be why the call raised. For example, a
    # tensor of ones may be an invalid index or permutation.
    raise click.ClickException(f"a call with tensors of ones raises {first_line(timing)}")


def _check(call: CallRecord) -> None:
    tensors = []
    for part in call.parts():
        if isinstance(part, TypeRecord):
            raise click.ClickException(f"no example can be created of an argument: {part.name}")
        if isinstance(part, TensorRecord):
            tensors.append(part)
            try:
                torch.empty(0, device=part.device)
            except Exception:
                problem = f"its tensors were on {part.device}, which is not available here"
                raise click.ClickException(problem) from None
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if nbytes > _LARGEST:
        raise click.ClickException(
            f"its tensors take {nbytes / 2**30:.1f} GiB, more than {_LARGEST / 2**30:.0f} GiB"
        )


def _is_on_accelerator(call: CallRecord) -> bool:
    devices = [
        torch.device(part.device if isinstance(part, TensorRecord) else part)
        for part in call.parts()
        if isinstance(part, (TensorRecord, torch.device))
    ]
    return any(device.type not in ("cpu", "meta") for device in devices)
