"""The cost of a call of an operator, through the dispatcher and natively, in this process."""

from __future__ import annotations

import contextlib
import functools
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import torchop
from torchop._compat import effects, torch_ops
from torchop._core.registry import find_schema
from torchop._errors import NothingToAccelerateWarning
from torchop._inspect.call_record import CallRecord, TensorRecord, TypeRecord
from torchop._native.extension import api
from torchop._schema import naming
from torchop.testing._samples import inside_a_graph
from torchop.testing._timing import Timing, Way, timed

_SECONDS = 0.5  # for each way of calling an operator, unless a call takes longer
_LARGEST = 2**30  # bytes of the tensors of a call

# The kinds of calls of an operator, the most frequent first, each with how often it came.
Kinds = list[tuple[CallRecord, int]]


class Cost(NamedTuple):
    """Microseconds for a call."""

    before: float  # through the dispatcher
    after: float  # natively
    noise: float  # how far a typical round of the faster way is above its fastest round

    @property
    def is_noise(self) -> bool:
        """Whether the two numbers differ by no more than the noise."""
        return abs(self.before - self.after) <= self.noise


class NotMeasuredError(Exception):
    """The reason why there is no time for an operator."""


@contextlib.contextmanager
def accelerated(*patterns: str) -> Iterator[torchop.Acceleration]:
    """Accelerates operators in the block, if the native call path can be had."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NothingToAccelerateWarning)
        acceleration = torchop.accelerate(*patterns)
    with acceleration:
        while api.status().state in ("building", "found"):
            time.sleep(0.05)
        yield acceleration


def native_share(op: str, kinds: Kinds) -> float | None:
    """The share of the calls that would be native; None if no example of any can be made.

    The operator must be accelerated. Nothing is called: `explain` decides, with tensors of the same
    kind, but of one element.
    """
    native = total = 0
    for call, count in kinds:
        with contextlib.suppress(Exception):  # its tensors cannot be made here
            example = _without_dimensions(call).example()
            native += count * (example is not None and _explains_native(op, *example))
            total += count
    return native / total if total else None


def _explains_native(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    args, kwargs = inside_a_graph(find_schema(naming.parse(op)), args, kwargs)
    return torchop.explain(op, *args, **kwargs).native


def _without_dimensions(recorded: Any) -> Any:
    if isinstance(recorded, CallRecord):
        args = tuple(map(_without_dimensions, recorded.args))
        return CallRecord(args, {k: _without_dimensions(v) for k, v in recorded.kwargs.items()})
    if isinstance(recorded, TensorRecord):
        return recorded._replace(shape=(), stride=None)
    if isinstance(recorded, list):
        return list(map(_without_dimensions, recorded))
    return recorded


def measured(op: str, kinds: Kinds) -> Cost:
    """The cost of the most frequent kind of call that can be measured."""
    if effects.effect_of(op) is not None:
        raise NotMeasuredError("it has an effect, which a measurement would repeat")
    problem = None
    for call, _ in kinds:
        try:
            return _measured_call(op, call)
        except NotMeasuredError as error:
            problem = problem or error
    raise problem or NotMeasuredError("no kind of call was kept")


def _measured_call(op: str, call: CallRecord) -> Cost:
    _check(call)
    name = naming.parse(op)
    function = torch_ops.lookup_overload(*name)
    schema = find_schema(name)

    def example() -> tuple[Any, Any]:
        args_and_kwargs = call.example()
        assert args_and_kwargs is not None  # as was checked
        return inside_a_graph(schema, *args_and_kwargs)

    try:
        args, kwargs = example()
    except Exception as error:
        raise NotMeasuredError(f"its tensors cannot be made here ({first_line(error)})") from None
    # A mutated tensor gets fresh contents for each round: after many calls it may overflow, and
    # arithmetic with infinities takes another time.
    fresh = example if schema.mutated else lambda: (args, kwargs)

    def make() -> Callable[[], Any]:
        args, kwargs = fresh()
        return functools.partial(function, *args, **kwargs)

    ways = {"after": Way(make), "before": Way(make, torchop.native.disabled)}
    with accelerated(op):
        timings = timed(ways, (args, kwargs), _SECONDS)
    after, before = (_working(timings[name]) for name in ways)
    # Other processes make rounds longer, never shorter: what can take the slower way for the faster
    # one are long rounds of the latter.
    return Cost(before.best, after.best, min(before, after).noise)


def _working(timing: Timing | Exception) -> Timing:
    if isinstance(timing, Timing):
        return timing
    # A tensor of ones may be no index, or no permutation.
    raise NotMeasuredError(f"a call with tensors of ones raises {first_line(timing)}")


def _check(call: CallRecord) -> None:
    """Raises NotMeasuredError where no example can be made, or only with too much memory."""
    for part in call.parts():
        if isinstance(part, TypeRecord):
            raise NotMeasuredError(f"no example can be made of an argument: {part.name}")
    tensors = [part for part in call.parts() if isinstance(part, TensorRecord)]
    for device in {tensor.device for tensor in tensors}:
        if not _is_here(torch.device(device)):
            raise NotMeasuredError(f"its tensors were on {device}, which is not here")
    nbytes = sum(tensor.nbytes for tensor in tensors)
    if nbytes > _LARGEST:
        raise NotMeasuredError(
            f"its tensors take {nbytes / 2**30:.1f} GiB, more than {_LARGEST / 2**30:.0f} GiB"
        )


def _is_here(device: torch.device) -> bool:
    if device.type in ("cpu", "meta"):
        return True
    with contextlib.suppress(Exception):  # there is no such backend in this PyTorch
        module = torch.get_device_module(device.type)
        return bool(module.is_available() and (device.index or 0) < module.device_count())
    return False


def first_line(error: BaseException) -> str:
    """The type of an exception, and the first line of what it says, made short."""
    text = str(error).strip().partition("\n")[0]
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def is_on_accelerator(call: CallRecord) -> bool:
    """Whether a call has tensors on an accelerator, or names it."""
    devices = [
        torch.device(part.device if isinstance(part, TensorRecord) else part)
        for part in call.parts()
        if isinstance(part, (TensorRecord, torch.device))
    ]
    return any(device.type not in ("cpu", "meta") for device in devices)
