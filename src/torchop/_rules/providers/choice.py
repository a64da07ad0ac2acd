"""Choose the kernel that runs a call, among the reference kernel and a device's providers."""

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
from torchop._errors import MissingKernelError, ProviderError, ProviderWarning, warn
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

# The maximum numbers of entries in the caches `Selection.chosen` and `Choice._selections`. Without
# a limit, the caches would grow forever if tensor sizes keep changing.
_MOST_KEYS = 4096
_MOST_SELECTIONS = 64


@dataclasses.dataclass(slots=True, eq=False)
class Selection:
    """The providers that calls try, for one combination of open `torchop.priority` blocks.

    Attributes:
        candidates: the providers to try, in order, and their kernels.
        fallback: the kernel that runs if no provider supports a call: the reference kernel, or a
            function that raises.
        skipped: maps the name of each provider that cannot run any call to the reason.
        falls_back: True if `fallback` is the reference kernel although the order does not name it.
        function: the kernel, if the same kernel runs every call. None if the choice depends on the
            arguments.
        chosen: caches the kernels that `answer` returned, by properties of the arguments. Threads
            write to this dict without a lock, because they all store the same kernel for a key.
    """

    order: ActiveOrder
    candidates: list[tuple[Provider, Function]]
    fallback: Function
    skipped: Mapping[str, str]
    falls_back: bool
    report: Callable[[Selection], None]
    tuned: TunedKernels | None
    function: Function | None = None
    chosen: dict[Any, Function] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.candidates:
            self.function = self.fallback
        elif self.candidates[0][0].accepts is None:
            self.function = self.candidates[0][1]

    def lookup(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Function:
        try:
            with dispatch.WithoutTorchFunctions():  # see `choose`
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
        """Choose the kernel for this call, and for all calls with the same cache key."""
        if self.tuned is not None:
            self.tuned.measure(args, kwargs)
        provider, function = self.choose(args, kwargs)
        if provider is None:
            self.report(self)
        return function

    def choose(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool = False
    ) -> tuple[Provider | None, Function]:
        """Return the provider that runs a call (None for the fallback), and the kernel to run."""
        # Ignore `shape` and other properties that a tensor subclass overrides, because the C++
        # implementation of the cache (csrc/choice.cpp) also ignores the overrides.
        with dispatch.WithoutTorchFunctions():
            for provider, function in self.candidates:
                if provider is TUNED_PROVIDER and self.tuned is not None:
                    if (fastest := self.tuned.fastest(args, kwargs, is_traced)) is not None:
                        return fastest
                elif provider.takes(args, kwargs, is_traced):
                    return provider, function
        return None, self.fallback


def _exclusion_reason(
    provider: Provider, settings: Settings, only_deterministic: bool
) -> str | None:
    if settings.batch_invariant_only and not provider.batch_invariant:
        return "it is not batch-invariant, and only such kernels are allowed"
    if only_deterministic and not provider.deterministic:
        return "it is not deterministic, and only such kernels are allowed"
    return provider.why_unsupported()


class Choice:
    """Chooses a kernel for each call on one device type, and runs it.

    An operator's call plan contains this object, or an equivalent C++ object, in place of a kernel.
    The C++ object calls `_selection`.
    """

    __slots__ = ("_has_random", "_selections", "kernels")

    def __init__(self, kernels: DeviceKernels) -> None:
        self.kernels = kernels
        self._has_random = not all(p.deterministic for p in kernels.providers.values())
        # The keys contain the settings of the open `torchop.priority` blocks, and whether PyTorch
        # requires deterministic algorithms.
        self._selections: dict[tuple[Settings, bool], Selection] = {}

    def function(self) -> Function:
        """Return the function that runs all calls.

        This is a kernel if all calls use the same kernel. Otherwise, the function chooses a kernel
        in each call.
        """
        if not priority.blocks_were_opened():
            with contextlib.suppress(ProviderError):  # each call will raise this error
                usual = self._selection(NO_BLOCK, False)
                is_fixed = not usual.candidates or usual.candidates[0][0].deterministic
                if usual.function is not None and is_fixed:
                    return usual.function
        return self._choosing()

    def _choosing(self) -> Function:
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

    def explain(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[str, Mapping[str, str], Function]:
        """Return the provider that runs a call, why the others do not, and the kernel."""
        selection = self._made(priority.current(), self._is_deterministic())
        provider, function = selection.choose(args, kwargs)
        chosen = REFERENCE if provider is None else provider.name
        skipped = dict(selection.skipped)
        own = [candidate for candidate, _ in selection.candidates]
        is_measured = provider is not None and all(provider is not each for each in own)
        for other, _ in selection.candidates:
            if other is provider or (is_measured and other is TUNED_PROVIDER):
                break
            skipped[other.name] = _UNMEASURED if other is TUNED_PROVIDER else _DECLINED
        for name in (*self.kernels.providers, REFERENCE):
            if name != chosen and is_measured:
                skipped[name] = f"{chosen} was measured as the fastest"
            elif name != chosen:
                skipped.setdefault(name, f"{chosen} comes before it")
        return chosen, skipped, function

    def trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Provider | None:
        """Return the provider whose kernel a compiler must inline.

        None means that the compiler must inline the reference kernel.
        """
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
        kernels = self.kernels
        order = priority.active_order(kernels.op, kernels.device, kernels.author, settings)
        only_deterministic = settings.deterministic_only or is_deterministic
        candidates: list[Provider] = []
        skipped: dict[str, str] = {}
        for name in order.names:
            if name == REFERENCE:
                break
            if name == TUNED:
                candidates.append(TUNED_PROVIDER)
                continue
            provider = kernels.providers.get(name)
            if provider is None:
                skipped[name] = self._absence_reason(name, order)
            elif (why := _exclusion_reason(provider, settings, only_deterministic)) is not None:
                skipped[name] = why
            else:
                candidates.append(provider)
                if provider.accepts is None:
                    break
        for name in kernels.providers:
            if name not in order.names:
                skipped[name] = (
                    f"the order of {order.by} does not name it" if order.names else _UNNAMED
                )
        pairs = [
            (p, self._profiled(settings, p.name, kernels.prepare(p.function))) for p in candidates
        ]
        falls_back = bool(order.names) and REFERENCE not in order.names
        fallback = kernels.reference
        if fallback is None or (settings.strict and falls_back):
            falls_back = False
            fallback = self._raising_kernel(order, candidates, skipped)
        fallback = self._profiled(settings, REFERENCE, fallback)
        tuned = None
        if TUNED_PROVIDER in candidates:
            allowed = {
                name: provider
                for name, provider in kernels.providers.items()
                if _exclusion_reason(provider, settings, only_deterministic) is None
            }
            profiled = functools.partial(self._profiled, settings)
            tuned = TunedKernels(kernels, allowed, settings.tuner, profiled)
        report = functools.partial(self._report, is_declined=True)
        return Selection(order, pairs, fallback, skipped, falls_back, report, tuned)

    def _absence_reason(self, name: str, order: ActiveOrder) -> str:
        op, device, *_ = self.kernels
        if name in self.kernels.known:
            return f"it has no kernel for {device or 'every device'}"
        if name in self.kernels.removed:
            return "it was removed, with the library that it was registered through"
        if order.is_exact:
            raise priority.unknown_provider(order.by, op, name, self.kernels.known)
        return f"{op} has no such provider"

    def _profiled(self, settings: Settings, name: str, function: Function) -> Function:
        if not settings.profile:
            return function
        label = f"{self.kernels.op}[{name}]"

        def profiled(*args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(label):
                return function(*args, **kwargs)

        profiled.__wrapped__ = function  # type: ignore[attr-defined]
        return profiled

    def _raising_kernel(
        self, order: ActiveOrder, candidates: list[Provider], skipped: Mapping[str, str]
    ) -> Function:
        op, device, reference, providers, *_ = self.kernels
        reasons = {name: why for name, why in skipped.items() if name in order.names}
        reasons |= {
            provider.name: _UNMEASURED if provider is TUNED_PROVIDER else _DECLINED
            for provider in candidates
        }
        listed = "; ".join(f"{name}: {why}" for name, why in reasons.items())
        names = list(providers)

        def raise_error(*args: Any, **kwargs: Any) -> Any:
            # `device` is None if these kernels are for every device, so name the device of the
            # call.
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
                f"{op} does not have a kernel registered for {where}, except for providers that "
                f"no order names: {', '.join(names)}. Name one: "
                f"torchop.set_priority({{'{op}': {names[:1]}}})."
            )

        return raise_error

    def _report(self, selection: Selection, is_declined: bool) -> None:
        """Log or warn once for each provider that the order contains but that calls skip."""
        op, device, _, providers, known, removed, *_ = self.kernels
        reportable = {*providers, *(set(removed) - set(known))}
        reasons = {name: why for name, why in selection.skipped.items() if name in reportable}
        if is_declined:
            reasons |= {p.name: _DECLINED for p, _ in selection.candidates if p.name in providers}
        falls_back = selection.falls_back and (is_declined or not selection.candidates)
        for name, why in reasons.items():
            if name not in selection.order.names:
                continue
            # Skipping a provider is normal if a later one in the order runs instead, so only log
            # that. Warn if the provider can never run, or if the reference kernel runs instead.
            provider = providers.get(name)
            never_runs = provider is None or provider.why_unsupported() is not None
            warns = falls_back or never_runs
            if (name, warns) in self.kernels.reported:
                continue
            self.kernels.reported.add((name, warns))
            on = "" if device is None else f" on {device}"
            end = ", and the reference runs instead" if falls_back else ""
            text = f"{op}: the provider {name!r} is skipped{on}, because {why}{end}."
            logs.calls.info("%s", text)
            if warns:
                fix = (
                    "leave it out of that order"
                    if never_runs
                    else f"end that order with {REFERENCE!r}"
                )
                warn(
                    f"{text} It is in the order of {selection.order.by}. If that is intended, "
                    f"{fix}.",
                    ProviderWarning,
                )


_UNMEASURED = "no measurement matches the call"
_DECLINED = "`supports` returned False"
_UNNAMED = "no order names it"


def choice_by_device(choices: Mapping[str, Function], others: Function) -> Function:
    """Return a function that calls one of `choices`, which maps device types to functions.

    The function selects by the device type of its first tensor argument. If `choices` does not
    contain this device type, the function calls `others`.
    """

    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensors: Iterator[Tensor] = tensors_in((*args, *kwargs.values()))
        device = next((tensor.device.type for tensor in tensors), "")
        return choices.get(device, others)(*args, **kwargs)

    return chosen


def _key(value: Any) -> Any:
    """Return a cache key with all properties of an argument that `supports` may read."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise UnknownKindError
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, (list, tuple)):
        return tuple(map(_key, value))
    kind = type(value)
    if kind is float:
        # Use the number's text as the key, because -0.0 == 0.0 and nan != nan.
        return value.hex()
    if kind is complex:
        return kind, repr(value)
    if kind in PLAIN:
        return kind, value  # with the type, because 1 == True
    raise UnknownKindError
