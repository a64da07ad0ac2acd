"""Choosing: which of the kernels of one device runs a call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import dispatch, logs
from torchop._core.call import tensors_in
from torchop._errors import (
    MissingKernelError,
    ProviderError,
    ProviderNameError,
    ProviderWarning,
    warn,
)
from torchop._rules.providers import priority
from torchop._rules.providers.candidates import DeviceKernels, Function, TunedKernels
from torchop._rules.providers.priority import (
    NO_BLOCK,
    REFERENCE,
    TUNED,
    ActiveOrder,
    Settings,
)
from torchop._rules.providers.provider import TUNED_PROVIDER, Provider
from torchop._rules.providers.tuned import PLAIN, UnknownKindError

# The table of a selection begins again when it has so many keys: calls of ever new sizes would
# otherwise fill the memory. Finding out again takes microseconds, once in so many calls.
_MOST_KEYS = 4096
_MOST_SELECTIONS = 64


@dataclasses.dataclass(slots=True, eq=False)
class Selection:
    """What one order leaves: the first provider that accepts a call, and else the reference.

    Tables of calls that were seen, here and in C++, are in front of `answer`, which alone decides.
    """

    order: ActiveOrder
    candidates: list[tuple[Provider, Function]]
    fallback: Function
    passed_by: Mapping[str, str]  # by name, why
    # Whether the reference, where it runs, runs in place of what the order names.
    falls_back: bool
    report: Callable[[Selection], None]  # called where no provider accepts a call
    tuned: TunedKernels | None  # what the order stands for by "tuned", if it says so
    # What runs, where no provider looks at the arguments.
    function: Function | None = None
    # By what `supports` may read of a call, what runs. Threads may write at once: they find the
    # same, so a lock would guard nothing.
    chosen: dict[Any, Function] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.candidates:
            self.function = self.fallback
        elif self.candidates[0][0].accepts is None:
            self.function = self.candidates[0][1]

    def lookup(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Function:
        """The function for a call, from the table if it is there."""
        try:
            with dispatch.WithoutTorchFunctions():  # as in `choose`
                key = tuple(kwargs), tuple(map(_key, (*args, *kwargs.values())))
        except UnknownKindError:
            return self.answer(args, kwargs)
        function = self.chosen.get(key)
        if function is None:
            function = self.answer(args, kwargs)
            if len(self.chosen) >= _MOST_KEYS:
                self.chosen = {}
            self.chosen[key] = function
        return function

    def answer(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Function:
        """The function for a call, and for those with the same key."""
        if self.tuned is not None:
            self.tuned.measure(args, kwargs)
        provider, function = self.choose(args, kwargs)
        if provider is None:
            self.report(self)
        return function

    def choose(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool = False
    ) -> tuple[Provider | None, Function]:
        """The first provider that accepts a call, None for the reference, and the function."""
        # A subclass that says something else of its shape does not say it to the tables in front.
        with dispatch.WithoutTorchFunctions():
            for provider, function in self.candidates:
                if provider is TUNED_PROVIDER and self.tuned is not None:
                    if (fastest := self.tuned.fastest(args, kwargs, is_traced)) is not None:
                        return fastest
                elif provider.takes(args, kwargs, is_traced):
                    return provider, function
        return None, self.fallback


def _why_not(provider: Provider, settings: Settings, only_deterministic: bool) -> str | None:
    """Why a provider cannot run any call; None if it can."""
    if settings.batch_invariant_only and not provider.batch_invariant:
        return "it is not batch-invariant, and only such kernels are allowed"
    if only_deterministic and not provider.deterministic:
        return "it is not deterministic, and only such kernels are allowed"
    return provider.why_unsupported()


class Choice:
    """Finds the function that runs a call, by the order in force and what the providers accept.

    An object, or one in C++ that asks it, is the kernel of one device in a plan, so it is called
    with all arguments. The plan, and what runs a call, know of it no more than that.
    """

    __slots__ = ("_has_random", "_kernels", "_selections")

    def __init__(self, kernels: DeviceKernels) -> None:
        self._kernels = kernels
        self._has_random = not all(p.deterministic for p in kernels.providers.values())
        # By the settings of blocks, and whether only deterministic kernels are allowed.
        self._selections: dict[tuple[Settings, bool], Selection] = {}

    def function(self) -> Function:
        """What a plan calls: the one function that can run, or what chooses for each call."""
        if not priority.blocks_were_opened():
            with contextlib.suppress(ProviderNameError):  # what chooses raises it, for every call
                usual = self._selection(NO_BLOCK, False)
                is_fixed = not usual.candidates or usual.candidates[0][0].deterministic
                if usual.function is not None and is_fixed:
                    return usual.function
        return self._choosing()

    def _choosing(self) -> Function:
        """What chooses for each call, in C++ if the extension is there."""
        if _hooks.extension.Choice is None:
            return self.__call__
        chosen: Function = _hooks.extension.Choice(
            priority.open_blocks, self._selection, self._has_random
        )
        return chosen

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        selection = self._selection(priority.current(), self._is_deterministic())
        function = selection.function or selection.lookup(args, kwargs)
        return function(*args, **kwargs)

    @property
    def kernels(self) -> DeviceKernels:
        """The kernels that it chooses between."""
        return self._kernels

    def explain(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, str], Function]:
        """The provider that would run a call, why each other one would not, and the function."""
        selection = self._made(priority.current(), self._is_deterministic())
        provider, function = selection.choose(args, kwargs)
        chosen = REFERENCE if provider is None else provider.name
        passed_by = dict(selection.passed_by)
        own = [candidate for candidate, _ in selection.candidates]
        is_measured = provider is not None and all(provider is not each for each in own)
        for other, _ in selection.candidates:
            if other is provider or (is_measured and other is TUNED_PROVIDER):
                break
            passed_by[other.name] = _UNMEASURED if other is TUNED_PROVIDER else _DECLINED
        for name in (*self._kernels.providers, REFERENCE):
            if name != chosen and is_measured:
                passed_by[name] = f"{chosen} was measured as the fastest"
            elif name != chosen:
                passed_by.setdefault(name, f"{chosen} comes before it")
        return chosen, passed_by, function

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Provider | None:
        """The provider whose kernel a compiler is to trace; None for the reference."""
        selection = self._selection(priority.current(), self._is_deterministic())
        provider, _ = selection.choose(args, kwargs, is_traced=True)
        return None if provider is None or provider.name == REFERENCE else provider

    def _is_deterministic(self) -> bool:
        return self._has_random and torch.are_deterministic_algorithms_enabled()

    def _selection(self, settings: Settings, is_deterministic: bool) -> Selection:
        key = settings, is_deterministic
        selection = self._selections.get(key)
        if selection is None:
            selection = self._made(settings, is_deterministic)
            self._report(selection, False)
            if len(self._selections) >= _MOST_SELECTIONS:
                self._selections = {}
            self._selections[key] = selection
        return selection

    def _made(self, settings: Settings, is_deterministic: bool) -> Selection:
        """What the order leaves, by all that is known before a call."""
        kernels = self._kernels
        order = priority.active_order(kernels.op, kernels.device, kernels.author, settings)
        only_deterministic = settings.deterministic_only or is_deterministic
        candidates: list[Provider] = []
        passed_by: dict[str, str] = {}
        for name in order.names:
            if name == REFERENCE:
                break
            if name == TUNED:
                candidates.append(TUNED_PROVIDER)
                continue
            provider = kernels.providers.get(name)
            if provider is None:
                passed_by[name] = self._why_not_here(name, order)
            elif (why := _why_not(provider, settings, only_deterministic)) is not None:
                passed_by[name] = why
            else:
                candidates.append(provider)
                if provider.accepts is None:
                    break
        for name in kernels.providers:
            if name not in order.names:
                passed_by[name] = (
                    f"the order of {order.by} does not name it" if order.names else _UNASKED
                )
        pairs = [
            (p, self._profiled(settings, p.name, kernels.prepare(p.function))) for p in candidates
        ]
        falls_back = bool(order.names) and REFERENCE not in order.names
        fallback = kernels.reference
        if fallback is None or (settings.strict and falls_back):
            falls_back = False
            fallback = self._refusal(order, candidates, passed_by)
        fallback = self._profiled(settings, REFERENCE, fallback)
        tuned = None
        if TUNED_PROVIDER in candidates:
            allowed = {
                name: provider
                for name, provider in kernels.providers.items()
                if _why_not(provider, settings, only_deterministic) is None
            }
            profiled = functools.partial(self._profiled, settings)
            tuned = TunedKernels(kernels, allowed, settings.tuner, profiled)
        report = functools.partial(self._report, is_declined=True)
        return Selection(order, pairs, fallback, passed_by, falls_back, report, tuned)

    def _why_not_here(self, name: str, order: ActiveOrder) -> str:
        op, device, *_ = self._kernels
        if name in self._kernels.known:
            return f"it has no kernel for {device or 'every device'}"
        if name in self._kernels.removed:
            return "it was removed, with the library that it was registered through"
        if order.is_exact:
            raise priority.unknown_provider(order.by, op, name, self._kernels.known)
        return f"{op} has no such provider"

    def _profiled(self, settings: Settings, name: str, function: Function) -> Function:
        """The function; within `priority(profile=True)`, a profiler shows it with its provider."""
        if not settings.profile:
            return function
        label = f"{self._kernels.op}[{name}]"

        def profiled(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(label):
                return function(*args, **kwargs)

        profiled.__wrapped__ = function  # type: ignore[attr-defined]
        return profiled

    def _refusal(
        self, order: ActiveOrder, candidates: list[Provider], passed_by: Mapping[str, str]
    ) -> Function:
        op, device, reference, providers, *_ = self._kernels
        reasons = {name: why for name, why in passed_by.items() if name in order.names}
        reasons |= {
            provider.name: _UNMEASURED if provider is TUNED_PROVIDER else _DECLINED
            for provider in candidates
        }
        listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        names = list(providers)

        def refuse(*args: Any, **kwargs: Any) -> Any:
            # The kernel for every device knows no device, but the call does.
            where = device or next((t.device.type for t in tensors_in(args)), "every device")
            if reference is not None:
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
                f"{op} does not have a kernel registered for {where}, except those of providers, "
                f"which no order asks for: {', '.join(names)}. Ask for one: "
                f"torchop.set_priority({{'{op}': {names[:1]}}})."
            )

        return refuse

    def _report(self, selection: Selection, is_declined: bool) -> None:
        """Says once of each provider that was asked for why it is passed by."""
        op, device, _, providers, known, removed, *_ = self._kernels
        asked = {*providers, *(set(removed) - set(known))}
        reasons = {name: why for name, why in selection.passed_by.items() if name in asked}
        if is_declined:
            reasons |= {p.name: _DECLINED for p, _ in selection.candidates if p.name in providers}
        falls_back = selection.falls_back and (is_declined or not selection.candidates)
        for name, why in reasons.items():
            if name not in selection.order.names:
                continue
            # One of several in an order that is passed by for another one is no surprise, except
            # where it can never run.
            provider = providers.get(name)
            never_runs = provider is None or provider.why_unsupported() is not None
            warns = falls_back or never_runs
            if (name, warns) in self._kernels.reported:
                continue
            self._kernels.reported.add((name, warns))
            on = "" if device is None else f" on {device}"
            end = ", and the reference runs instead" if falls_back else ""
            text = f"{op}: the provider {name!r} is passed by{on}, because {why}{end}."
            logs.calls.info("%s", text)
            if warns:
                fix = (
                    "leave it out of that order"
                    if never_runs
                    else f"end that order with {REFERENCE!r}, which stands for the reference"
                )
                warn(
                    f"{text} It is in the order of {selection.order.by}. If that is intended, "
                    f"{fix}.",
                    ProviderWarning,
                )


_UNMEASURED = "no measurement is for such a call"
_DECLINED = "its `supports` says no to the arguments"
_UNASKED = "no order names it"


def choice_by_device(choices: Mapping[str, Function], others: Function) -> Function:
    """The kernel for every device, where orders are for some device types only."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensors: Iterator[Tensor] = tensors_in((*args, *kwargs.values()))
        device = next((tensor.device.type for tensor in tensors), "")
        return choices.get(device, others)(*args, **kwargs)

    return chosen


def _key(value: Any) -> Any:
    """What `supports` may read of an argument, as a part of a key."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UnknownKindError
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    kind = type(value)
    if kind is float:
        return value.hex()  # which tells -0.0 from 0.0, and finds nan again
    if kind is complex:
        return kind, repr(value)  # as for a float
    if kind in PLAIN:
        return kind, value  # 1 equals True
    raise UnknownKindError
