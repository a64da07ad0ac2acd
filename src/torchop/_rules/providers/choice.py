"""Choose the kernel that runs a call: the reference kernel, or one of the device's providers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import dispatch, logs
from torchop._core.call import tensors_in
from torchop._errors import MissingKernelError, ProviderError, ProviderWarning, warn
from torchop._rules.providers import priority, tuned
from torchop._rules.providers.measurements import Measurement
from torchop._rules.providers.priority import (
    NO_BLOCK,
    REFERENCE,
    TUNED,
    ActiveOrder,
    ScopedOrders,
    Settings,
)
from torchop._rules.providers.provider import Function, Provider, Selected
from torchop._rules.providers.tuned import PLAIN, Tuning, UnknownKindError
from torchop.extend import OpName

# The maximum number of entries in the cache of a `Choice`. Without this limit, the cache would grow
# without bound in programs whose tensor sizes keep changing.
_MOST_KEYS = 4096


class Candidate(NamedTuple):
    """An entry in the order in which calls try an operator's providers (alternative kernels).

    Attributes:
        select: a function that returns the kernel for a call, or None if this candidate does not
            support the call. It takes the call's positional and keyword arguments, and whether a
            compiler is tracing the call. The attribute itself is None if the candidate cannot run
            any call.
        takes_all: whether `select` returns the same kernel for all calls.
        declined: the reason that messages give if a call skips this candidate.
    """

    name: str
    select: Callable[[tuple[Any, ...], Mapping[str, Any], bool], Selected | None] | None
    takes_all: bool = False
    declined: str = "`supports` returned False"


class Resolved(NamedTuple):
    """The candidates for all calls on one device under the same settings.

    Attributes:
        candidates: the candidates, in the order in which calls try them. The last candidate stands
            for the reference kernel and accepts all calls, so every search ends there. If the
            reference kernel cannot run, this candidate selects a function that raises an error.
        falls_back: whether calls may fall back to the reference kernel although the order does not
            name it.
    """

    settings: Settings
    order: ActiveOrder
    candidates: Sequence[Candidate]
    falls_back: bool

    @property
    def first(self) -> Candidate:
        """The first candidate that can run calls."""
        return next(each for each in self.candidates if each.select is not None)

    def select(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool = False
    ) -> tuple[Selected, Candidate, Mapping[str, str]]:
        """Return the kernel for a call, the candidate that selected it, and the skipped candidates.

        The third value maps the name of each skipped candidate to the reason why it was not
        selected.
        """
        declined: dict[str, str] = {}
        # Ignore a tensor subclass's overrides of `shape` and other properties, because the C++
        # implementation of the cache (csrc/choice.cpp) ignores them too.
        with dispatch.WithoutTorchFunctions():
            for candidate in self.candidates:
                found = candidate.select and candidate.select(args, kwargs, is_traced)
                if found is not None:
                    return found, candidate, declined
                declined[candidate.name] = candidate.declined
        raise AssertionError("the last candidate did not take the call")


class Table(Protocol):
    """The part of an operator's `ProviderTable` that a `Choice` reads."""

    @property
    def names(self) -> Collection[str]: ...
    @property
    def removed(self) -> frozenset[str]: ...
    @property
    def orders(self) -> ScopedOrders: ...
    @property
    def tuning(self) -> Tuning: ...
    @property
    def reported(self) -> set[tuple[str, bool]]: ...


@dataclasses.dataclass(eq=False)
class Choice:
    """Chooses among an operator's kernels on one device type, for each call.

    An operator's call plan (its compiled rules) contains this object in place of a kernel. If the
    C++ extension is loaded, the plan contains an equivalent C++ object instead, which calls
    `resolve`.

    Attributes:
        device: the device type. None stands for all device types for which no separate kernel is
            registered.
        reference: the kernel that was registered without a provider, if there is one.
        providers: the providers on this device by name, in the order of registration.
        table: all providers of the operator, and the settings of its author.
        prepare: wraps a kernel to check the operator's arguments before calling it.
    """

    op: OpName
    device: str | None
    reference: Function | None
    providers: Mapping[str, Provider]
    table: Table
    prepare: Callable[[Function], Function]
    # Caches the results of `resolve` by settings, and kernels by settings and call arguments.
    # Threads write to this dict without a lock, which is safe because they all store equal values
    # for the same key.
    _cache: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def function(self) -> Function:
        """Return the function that runs all calls.

        If all calls use the same kernel, this is the kernel itself, so calls have no overhead.
        Otherwise, the function chooses a kernel in each call.
        """
        if not priority.blocks_were_opened():
            with contextlib.suppress(ProviderError):  # each call will raise this error
                first = self._resolved(NO_BLOCK, False).first
                provider = self.providers.get(first.name)
                if first.takes_all and (provider is None or provider.deterministic):
                    return self.resolve(NO_BLOCK, False)[0]
        if _hooks.extension.Choice is None:
            return self.__call__
        chosen: Function = _hooks.extension.Choice(priority.open_blocks, self.resolve)
        return chosen

    def resolve(self, settings: Settings, is_deterministic: bool) -> tuple[Function, bool]:
        """Return a function for all calls with the same settings, and whether it is a kernel.

        If the function is not a kernel, it takes the arguments of a call and returns the kernel to
        use for all calls with the same cache key. `is_deterministic` is True under
        `torch.use_deterministic_algorithms(True)`.
        """
        resolved = self._resolved(settings, is_deterministic)
        self._report_unsupported(resolved)
        if resolved.first.takes_all:
            return self._prepared(settings, resolved.select((), {})[0]), True
        return functools.partial(self._select, resolved), False

    def _select(self, resolved: Resolved, /, *args: Any, **kwargs: Any) -> Function:
        tuner = resolved.settings.tuner
        if tuner is not None and any(each.name == TUNED for each in resolved.candidates):
            tuner.measure(self, args, kwargs)
        selected, candidate, declined = resolved.select(args, kwargs)
        if candidate is resolved.candidates[-1]:
            self._report(resolved, declined)
        return self._prepared(resolved.settings, selected)

    def _prepared(self, settings: Settings, selected: Selected) -> Function:
        name, function = selected
        if name != REFERENCE:  # the reference is already prepared
            function = self.prepare(function)
        if not settings.profile:
            return function
        label = f"{self.op}[{name}]"

        def profiled(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(label):
                return function(*args, **kwargs)

        profiled.__wrapped__ = function  # type: ignore[attr-defined]
        return profiled

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Run a call without the C++ extension. csrc/choice.cpp implements the same logic."""
        settings = priority.current(), torch.are_deterministic_algorithms_enabled()
        found = self._cache.get(settings)
        if found is None:
            found = self._add(settings, self.resolve(*settings))
        function, is_kernel = found
        if not is_kernel:
            try:
                with dispatch.WithoutTorchFunctions():  # see `Resolved.select`
                    keys = map(_key, (*args, *kwargs.values()))
                    key = (*settings, tuple(kwargs), *keys)
            except UnknownKindError:
                kernel = function(*args, **kwargs)
            else:
                kernel = self._cache.get(key)
                if kernel is None:
                    kernel = self._add(key, function(*args, **kwargs))
            function = kernel
        return function(*args, **kwargs)

    def _add(self, key: Any, value: Any) -> Any:
        if len(self._cache) >= _MOST_KEYS:
            self._cache = {}
        self._cache[key] = value
        return value

    def explain(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, str], Function]:
        """Return the provider that runs a call, why each provider runs or not, and the kernel."""
        resolved = self._current()
        (chosen, function), candidate, declined = resolved.select(args, kwargs)
        reasons, names = dict(declined), resolved.order.names
        for name in (*self.providers, REFERENCE):
            if candidate.name == TUNED:
                why = f"{chosen} was measured as the fastest"
            elif name in (REFERENCE, *names):
                why = f"{chosen} comes before it"
            else:
                why = f"the order of {resolved.order.by} does not name it" if names else _UNNAMED
            reasons.setdefault(name, why)
        reasons[chosen] = "runs"
        return chosen, reasons, self._prepared(resolved.settings, Selected(chosen, function))

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Function | None:
        """Return the provider's kernel that compilers inline, or None for the reference kernel."""
        resolved = self._current()
        self._report_unsupported(resolved)
        name, function = resolved.select(args, kwargs, is_traced=True)[0]
        return None if name == REFERENCE else function

    def _current(self) -> Resolved:
        return self._resolved(priority.current(), torch.are_deterministic_algorithms_enabled())

    def measured(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Measurement | None:
        digests = {name: tuned.digest(p.written) for name, p in self.providers.items()}
        if self.reference is not None:
            digests[REFERENCE] = tuned.digest(self.reference)
        return tuned.find(self.op, self.table.tuning, digests, args, kwargs, self.table.reported)

    def _resolved(self, settings: Settings, is_deterministic: bool) -> Resolved:
        order = priority.active_order(self.op, self.device, self.table.orders, settings)
        only_deterministic = settings.deterministic_only or is_deterministic
        candidates: list[Candidate] = []

        def why_excluded(provider: Provider) -> str | None:
            if settings.batch_invariant_only and not provider.batch_invariant:
                return "it is not batch-invariant, and only such kernels are allowed"
            if only_deterministic and not provider.deterministic:
                return "it is not deterministic, and only such kernels are allowed"
            return provider.why_unsupported()

        for name in itertools.takewhile(REFERENCE.__ne__, order.names):
            provider = self.providers.get(name)
            if name == TUNED:
                candidates.append(self._tuned(why_excluded))
            elif provider is None:
                candidates.append(Candidate(name, None, declined=self._why_absent(name, order)))
            elif (why := why_excluded(provider)) is not None:
                candidates.append(Candidate(name, None, declined=why))
            else:
                candidates.append(Candidate(name, provider.select, provider.accepts is None))
                if provider.accepts is None:
                    break
        falls_back = bool(order.names) and REFERENCE not in order.names
        kernel = self.reference
        if kernel is None or (settings.strict and falls_back):
            kernel, falls_back = self._raising_kernel(order, candidates), False
        reference = Selected(REFERENCE, kernel)
        candidates.append(Candidate(REFERENCE, lambda *_: reference, takes_all=True))
        return Resolved(settings, order, candidates, falls_back)

    def _tuned(self, why_excluded: Callable[[Provider], str | None]) -> Candidate:
        """Return a candidate that selects the kernel that was measured as the fastest."""
        reference = self.reference
        allowed = {n: each for n, each in self.providers.items() if why_excluded(each) is None}

        def select(
            args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool
        ) -> Selected | None:
            measurement = self.measured(args, kwargs)
            for name, config, *_ in () if measurement is None else measurement.kernels:
                if name == REFERENCE and reference is not None:
                    return Selected(name, reference)
                # A stored measurement may name a provider, or one of its tuning configs, that no
                # longer exists or does not support this call, so check each kernel and fall back to
                # the next one.
                provider = allowed.get(name)
                if provider is not None and provider.takes(args, kwargs, is_traced):
                    configs = provider.configs or ({},)
                    if config in configs:
                        return Selected(name, provider.kernels[configs.index(config)])
            return None

        return Candidate(TUNED, select, declined="no measurement matches the call")

    def _why_absent(self, name: str, order: ActiveOrder) -> str:
        if name in self.table.names:
            return f"it has no kernel for {self.device or 'every device'}"
        if name in self.table.removed:
            return "it was removed, with the library that it was registered through"
        if order.is_exact:
            raise priority.unknown_provider(order.by, self.op, name, self.table.names)
        return f"{self.op} has no such provider"

    def _raising_kernel(self, order: ActiveOrder, candidates: Sequence[Candidate]) -> Function:
        op, device, names = self.op, self.device, list(self.providers)
        listed = "; ".join(f"{each.name}: {each.declined}" for each in candidates)

        def raise_error(*args: Any, **kwargs: Any) -> Any:
            # `device` is None for kernels that apply to every device, so report the device of the
            # call's tensors instead.
            where = device or next((t.device.type for t in tensors_in(args)), "every device")
            if self.reference is not None:
                raise ProviderError(
                    f"{op}: no provider of the order of {order.by} can run this call on {where} "
                    f"({listed}), and strict=True forbids the reference."
                )
            if order.names:
                raise MissingKernelError(
                    f"{op} does not have a kernel registered for {where} that can run this call "
                    f"({listed}), and it has no reference there. Register one: "
                    f"register_kernel({device!r}, function)."
                )
            raise MissingKernelError(
                f"{op} does not have a kernel registered for {where}, except for providers that "
                f"no order names: {', '.join(names)}. Name one: "
                f"torchop.set_priority({{'{op}': {names[:1]}}})."
            )

        return raise_error

    def _report_unsupported(self, resolved: Resolved) -> None:
        """Report each provider that the priority order names although it cannot run any call."""
        unsupported = (each for each in resolved.candidates if each.select is None)
        self._report(resolved, {each.name: each.declined for each in unsupported})

    def _report(self, resolved: Resolved, declined: Mapping[str, str]) -> None:
        """Log or warn once about each provider that is in the order but that calls skip.

        A provider is an alternative kernel. `declined` maps the skipped providers to the reasons.
        """
        falls_back = resolved.falls_back and len(declined) == len(resolved.candidates) - 1
        reportable = {*self.providers, *self.table.removed.difference(self.table.names)}
        for name, why in declined.items():
            if name not in reportable:
                continue
            # Skipping a provider is normal if a later one in the order runs instead, so this is
            # only logged. Warn if the provider can never run, or if the call falls back to the
            # reference kernel.
            provider = self.providers.get(name)
            never_runs = provider is None or provider.why_unsupported() is not None
            warns = falls_back or never_runs
            if (name, warns) in self.table.reported:
                continue
            self.table.reported.add((name, warns))
            on = "" if self.device is None else f" on {self.device}"
            end = ", and the reference runs instead" if falls_back else ""
            text = f"{self.op}: the provider {name!r} is skipped{on}, because {why}{end}."
            logs.calls.info("%s", text)
            if warns:
                fix = (
                    "leave it out of that order"
                    if never_runs
                    else f"end that order with {REFERENCE!r}"
                )
                warn(
                    f"{text} It is in the order of {resolved.order.by}. If that is intended, "
                    f"{fix}.",
                    ProviderWarning,
                )


_UNNAMED = "no order names it"


def choice_by_device(choices: Mapping[str, Function], others: Function) -> Function:
    """Return a function that calls one of `choices`, which maps device types to functions.

    The returned function looks up the device type of its first tensor argument. If `choices` does
    not contain this device type, it calls `others`.
    """

    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensors: Iterator[Tensor] = tensors_in((*args, *kwargs.values()))
        device = next((tensor.device.type for tensor in tensors), "")
        return choices.get(device, others)(*args, **kwargs)

    return chosen


def _key(value: Any) -> Any:
    """Return a cache key with every property of an argument that a `supports` function may read."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UnknownKindError
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    kind = type(value)
    if kind is float:
        # Use the text as the key, because with the number itself, 0.0 and -0.0 would share an
        # entry, and nan would never be found.
        return value.hex()
    if kind is complex:
        return kind, repr(value)
    if kind in PLAIN:
        return kind, value  # with the type, because 1 == True
    raise UnknownKindError
