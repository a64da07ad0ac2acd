"""Measure which kernel of an operator is fastest for each kind of call on this machine.

A *provider* is an alternative kernel of an operator. A *config* is one setting of the provider's
tunable parameters, such as a block size.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torchop import ProviderWarning, priority
from torchop._compat import autograd, devices, fake_tensors
from torchop._native.extension import files
from torchop._rules.providers import choice_of_call, measurements, tuned
from torchop._rules.providers.choice import Choice
from torchop._rules.providers.measurements import Measured, Measurement
from torchop._rules.providers.priority import REFERENCE
from torchop._rules.residuals.handover import requested
from torchop._rules.user.examples import make_examples
from torchop.extend import Operator, OpLike, short_repr, short_text, warn
from torchop.native import NativeUnavailableError
from torchop.testing import probes
from torchop.testing._samples import Sample, sample_of
from torchop.testing._timing import Timing, timed, way
from torchop.testing.process_state import restored

_SECONDS = 0.3  # the time limit for one kernel and one kind of call


class Tuned(NamedTuple):
    """The result of `torchop.testing.tune`. Print it to see a table.

    Attributes:
        op: the name of the operator.
        measurements: one entry for each kind of call, with the `device`, a description of the
            `call`, and the `kernels`, fastest first. Each kernel has a `provider`, a `config`,
            `microseconds` and an `interval`.
        problems: messages that say which kernels and calls were not measured, and why.

    Example:
        >>> import torchop
        >>> torchop.testing.Tuned("docs::scale", (), ("it has no call",)).problems
        ('it has no call',)
    """

    op: str
    measurements: tuple[Measurement, ...]
    problems: tuple[str, ...]

    def __str__(self) -> str:
        lines = [self.op]
        for measurement in self.measurements:
            lines.append(f"  {measurement.call}")
            for kernel in measurement.kernels:
                microseconds, interval = kernel.times
                lines.append(f"  {microseconds:>10} us  ({interval})  {kernel.label}")
        return "\n".join([*lines, *(f"  {problem}" for problem in self.problems)])


def tune(
    op: OpLike,
    inputs: Sequence[Any] | None = None,
    /,
    *,
    budget: float = 60.0,
    table: str | os.PathLike[str] | None = None,
) -> Tuned:
    """Measure which kernel of an operator is fastest on this machine.

    `tune` measures the reference (the operator's own kernel) and the kernel of each provider, with
    each of its configs. It skips kernels whose results differ from the reference by more than the
    provider's tolerance, and times the remaining kernels in alternation. On an accelerator, it
    measures the time between two events, with cold caches.

    Afterwards, operators with `"tuned"` in their priority run the fastest kernel, both in this
    process and in later ones.

    In a process group, all ranks must call `tune` with the same operator, because the first rank
    measures the kernels and broadcasts the result.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        inputs: the calls to measure, each as a tuple or a dict of arguments. Pass one call for each
            bucket of sizes. Defaults to the examples registered for the operator.
        budget: the time limit in seconds.
        table: a file to add the measurements to. A package can ship this file, and pass it to
            `CustomOp.set_tuning`. Defaults to a file in the user's cache.

    Returns:
        The measurements, and the reasons why certain kernels or calls were not measured.

    Raises:
        MissingRuleError: no inputs were passed, and no examples are registered.
        ValueError: the operator has no providers or no reference; or it has an effect that
            measuring would repeat; or an input is a tensor without data.
        TypeError: an input does not match the operator, or `budget` is not a number.

    Warns:
        ProviderWarning: the table cannot be written.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::twice", mutates_args=(), priority=["tuned"])
        ... def twice(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 2
        >>> @twice.register_kernel("cpu", provider="loop")
        ... def _(x):
        ...     return torch.tensor([2 * number for number in x.tolist()])
        >>> found = torchop.testing.tune(twice, [(torch.ones(1000),)])
        >>> [kernel.provider for kernel in found.measurements[0].kernels]
        ['reference', 'loop']

    `tune` is modeled after Triton's `autotune`, but measures kernels of any kind.
    """
    operator = Operator(op, "tune")
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"tune: budget is a number of seconds, got {short_repr(budget)}.")
    calls = [_call(operator, each) for each in _given(op, inputs)]
    tuner = _Tuner(budget, None if table is None else Path(table))
    choices = [choice_of_call(op, *call) for call in calls]
    for each, _ in choices:
        if (problem := why_not(operator, each)) is not None:
            raise ValueError(f"tune: {operator}: {problem}")
    for number, (each, (args, kwargs)) in enumerate(choices):
        assert each is not None  # checked by `why_not`
        tuner.find(each, args, kwargs, len(calls) - number)
    return tuner.finish(str(operator))


class tuning(priority):  # noqa: N801  (called like a function)
    """Measure the kernels of operators for the calls inside a `with` block.

    A call is measured if `"tuned"` is in the operator's priority and there is no measurement for
    arguments of this size yet. The measurements take effect after the block. Only calls from the
    current thread or asyncio task are measured. Calls during graph capture, tracing or a backward
    pass are skipped, as are calls of operators with an effect.

    In a process group, all ranks must enter and exit the block, because the first rank measures
    the kernels and broadcasts the result at the end of the block.

    Args:
        budget: the time limit in seconds.
        table: a file to add the measurements to, as in `torchop.testing.tune`.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::thrice", mutates_args=(), priority=["tuned"])
        ... def thrice(x: torch.Tensor) -> torch.Tensor:
        ...     return x * 3
        >>> @thrice.register_kernel("cpu", provider="loop")
        ... def _(x):
        ...     return torch.tensor([3 * number for number in x.tolist()])
        >>> with torchop.testing.tuning():
        ...     _ = thrice(torch.ones(1000))
        >>> torchop.explain(thrice, torch.zeros(999)).provider
        'reference'
    """

    def __init__(
        self, *, budget: float = 60.0, table: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self._options = budget, None if table is None else Path(table)
        self._tuners: list[_Tuner] = []

    def _recreate_cm(self) -> tuning:
        return tuning(budget=self._options[0], table=self._options[1])

    def __enter__(self) -> None:
        self._tuners.append(_Tuner(*self._options))
        self._flags = {"tuner": self._tuners[-1]}
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        tuner = self._tuners.pop()
        if self._tuners:  # an outer `with` block uses the same object
            self._flags = {"tuner": self._tuners[-1]}
        super().__exit__(*exception)
        tuner.finish("")


class _Tuner:
    def __init__(self, budget: float, table: Path | None) -> None:
        self._left, self._table = budget, table
        self._found: dict[tuple[Any, ...], Measurement] = {}
        self._seen: set[tuple[Any, ...]] = set()
        self._problems: list[str] = []
        self._lock = threading.RLock()  # measurements in parallel would slow each other down

    def measure(self, choice: Choice, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure a call from inside a `tuning` block, if the call can be repeated safely."""
        call = args, dict(kwargs)
        if _is_measurable(call) and why_not(Operator(choice.op, "tuning"), choice) is None:
            with self._lock:
                # The program's call may have requested residuals (kernel outputs that only the
                # backward pass uses). Make a separate request for the measured kernels, so that
                # they do not overwrite these residuals.
                requested(self, lambda: self.find(choice, *call, 1, known=True))

    def find(
        self,
        choice: Choice,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        calls: int,
        known: bool = False,
    ) -> None:
        """Measure the kernels for a call within the remaining budget.

        `calls` is the number of calls that still have to share the budget. With `known=True`, skip
        calls for which a measurement already exists.
        """
        operator = Operator(choice.op, "tune")
        names = [argument.name for argument in operator.schema.arguments]
        try:
            arguments, _ = tuned.described(args, kwargs)
            sizes = tuned.bucketed(names, choice.table.tuning.buckets, args, kwargs)
        except tuned.UnknownKindError:
            self._problems.append("a call was left out, because it has arguments of other kinds")
            return
        device = tuned.device_name((*args, *kwargs.values()))
        release = tuned.torch_release()
        measurement = Measurement(str(operator), device, release, arguments, sizes, ())
        if measurement.key in self._seen or _rank():  # only rank 0 measures
            return
        if known and choice.measured(args, kwargs) is not None:
            return
        self._seen.add(measurement.key)
        if self._left <= 0:
            self._problems.append(f"{measurement.call} was left out: the budget is spent")
            return
        start = time.perf_counter()
        measured, problems = measure_kernels(choice, (args, kwargs), self._left / calls)
        self._left -= time.perf_counter() - start
        self._problems += [f"{measurement.call}: {problem}" for problem in problems]
        if measured:
            self._found[measurement.key] = measurement._replace(kernels=measured)

    def finish(self, op: str) -> Tuned:
        """Broadcast the measurements to all ranks, save them to the table, and apply them."""
        found = tuple(self._found.values()), tuple(self._problems)
        if _rank() is not None and torch.distributed.get_world_size() > 1:
            box = [found]
            torch.distributed.broadcast_object_list(box, src=0)
            found = box[0]
        if found[0] and not _rank():
            try:
                _save(self._table, found[0])
            except (OSError, NativeUnavailableError, measurements.TableError) as error:
                warn(
                    "tune: the measurements count in this process only, because their table cannot "
                    f"be written: {short_text(error)}.",
                    ProviderWarning,
                )
        tuned.add(found[0])
        return Tuned(op, *found)


def measure_kernels(
    choice: Choice,
    call: Sample,
    seconds: float = 60.0,
    others: Mapping[str, Callable[..., Any]] | None = None,
) -> tuple[tuple[Measured, ...], list[str]]:
    """Time the kernels that agree with the reference kernel, and the functions in `others`.

    Return the measured kernels, fastest first, and the reasons why kernels were left out.
    """
    operator = Operator(choice.op, "tune")
    reference = choice.reference
    assert reference is not None  # callers have checked this with `why_not`
    own = Measured(REFERENCE, {}, tuned.digest(reference), 0, (0, 0))
    candidates = {REFERENCE: (own, reference)}
    problems = []

    def outcome(function: Callable[..., Any]) -> list[Any]:
        args, kwargs = probes.copies(call)
        return probes.outcome(operator.overload, args, kwargs, function)

    with restored(), torch.no_grad():
        expected = outcome(reference)
        for provider in choice.providers.values():
            if (problem := provider.why_unsupported()) is not None:
                problems.append(f"{provider.name}: {problem}")
                continue
            if not provider.takes(*call):
                continue
            for config, kernel in zip(provider.configs or ({},), provider.kernels, strict=True):
                name, digest = provider.name, tuned.digest(provider.written)
                measured = Measured(name, config, digest, 0, (0, 0))
                function = choice.prepare(kernel)
                try:
                    limits = provider.tolerance
                    probes.assert_same(outcome(function), expected, "its result", tolerance=limits)
                except Exception as error:  # a kernel may raise anything
                    problems.append(f"{measured.label} is left out: {short_text(error)}")
                    continue
                candidates[measured.label] = measured, function
        for name, function in (others or {}).items():
            candidates[name] = Measured(name, {}, "", 0, (0, 0)), function
        ways = {
            label: way(function, operator.schema, call, torch.no_grad)
            for label, (_, function) in candidates.items()
        }
        # Set aside a third of the time, because estimating the duration of a call takes time too.
        timings = timed(ways, call, min(_SECONDS, seconds / 1.5 / len(ways)), on_device=True)
    found = []
    for label, (measured, _) in candidates.items():
        timing = timings[label]
        if isinstance(timing, Timing):
            rounded = round(timing.interval[0], 3), round(timing.interval[1], 3)
            found.append(measured._replace(microseconds=round(timing.median, 3), interval=rounded))
        else:
            problems.append(f"{label} is left out: {short_text(timing)}")
    return tuple(sorted(found, key=lambda kernel: kernel.microseconds)), problems


def _given(op: OpLike, inputs: Sequence[Any] | None) -> list[Any]:
    if inputs is None:
        return [args if not kwargs else {**kwargs} for args, kwargs in make_examples(op)]
    if not isinstance(inputs, (list, tuple)) or not inputs:
        raise TypeError(
            f"tune: inputs is a list of calls, each a tuple of arguments or a dict of them, got "
            f"{short_repr(inputs)}."
        )
    return list(inputs)


def _call(operator: Operator, given: Any) -> Sample:
    args, kwargs = ((), given) if isinstance(given, Mapping) else (given, {})
    try:
        return sample_of(operator, "tune", args, kwargs)
    except TypeError as error:
        raise TypeError(f"tune: an input does not fit {operator}: {short_text(error)}") from None


def why_not(operator: Operator, choice: Choice | None) -> str | None:
    """Return why the kernels of an operator cannot be measured, or None if they can."""
    if choice is None or not choice.providers:
        return (
            "it has no providers, so there is nothing to choose from. Register some: "
            "register_kernel(device_types, function, provider=...)."
        )
    if choice.reference is None:
        return "it has no reference here that results could be compared with."
    if operator.effect is not None:
        return "it has an effect, which measuring would repeat."
    return None


def _is_measurable(call: Sample) -> bool:
    """Return whether timing a call is possible and meaningful in the current context."""
    tensors = probes.tensors_of(call)
    return not (
        devices.are_captured(tensors)
        or torch.compiler.is_compiling()
        or autograd.is_in_backward()
        or any(fake_tensors.is_fake(each) or not probes.is_plain(each) for each in tensors)
    )


def _rank() -> int | None:
    group = torch.distributed
    return group.get_rank() if group.is_available() and group.is_initialized() else None


def _save(table: Path | None, found: Sequence[Measurement]) -> None:
    path = table
    if path is None:
        files.make_cache_folder()
        path = tuned.users_table()
        assert path is not None  # because the cache folder exists
    with measurements.locked(path):
        before: Sequence[Measurement] = ()
        if path.exists():
            try:
                before = measurements.read(path)
            except measurements.NewerTableError:
                raise
            except measurements.TableError:
                pass  # replace the invalid file, about which earlier calls have warned
        measurements.write(path, measurements.merged(before, found))
