"""The kernels of one device, and the fastest of them for a call, as far as that was measured."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torchop._rules.providers import tuned
from torchop._rules.providers.measurements import Measurement
from torchop._rules.providers.priority import REFERENCE, Order, Tuner
from torchop._rules.providers.provider import TUNED_PROVIDER, Provider
from torchop._rules.providers.tuned import Tuning
from torchop.extend import OpName

Function = Callable[..., Any]


class DeviceKernels(NamedTuple):
    """The kernels of one operator that one device has, and all that decides between them.

    Attributes:
        op: the name of the operator.
        device: the device type; None for those without kernels of their own.
        reference: the kernel that was registered without a provider; None without one.
        providers: the others, by name, in the order in which they were registered.
        known: the names of all providers of the operator, for whichever device.
        removed: the names of those that it had once.
        author: the author's orders, by device type.
        reported: what was said of providers that were passed by; it outlives plans.
        tuning: what the author says about measurements.
        prepare: what a plan does to every kernel.
    """

    op: OpName
    device: str | None
    reference: Function | None
    providers: Mapping[str, Provider]
    known: Collection[str]
    removed: Collection[str]
    author: Mapping[str | None, Order]
    reported: set[tuple[str, bool]]
    tuning: Tuning
    prepare: Callable[[Function], Function]

    def measured(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Measurement | None:
        """What was measured of calls as this one; warns if it cannot be used."""
        digests = {name: tuned.digest(p.written) for name, p in self.providers.items()}
        if self.reference is not None:
            digests[REFERENCE] = tuned.digest(self.reference)
        return tuned.find(self.op, self.tuning, digests, args, kwargs, self.reported)


class TunedKernels(NamedTuple):
    """What "tuned" in an order stands for: of the kernels that may run, the fastest for a call."""

    kernels: DeviceKernels
    allowed: Mapping[str, Provider]
    tuner: Tuner | None
    profiled: Callable[[str, Function], Function]

    def measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measures the kernels for a call in a block of `torchop.tuning`."""
        if self.tuner is not None:
            self.tuner.measure(self.kernels, args, kwargs)

    def fastest(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool
    ) -> tuple[Provider, Function] | None:
        """The fastest one that takes a call, with the config it had; None if none was measured."""
        measurement, reference = self.kernels.measured(args, kwargs), self.kernels.reference
        for name, config, *_ in () if measurement is None else measurement.kernels:
            provider = self.allowed.get(name)
            if name == REFERENCE and reference is not None:
                found = TUNED_PROVIDER._replace(name=name, function=reference, written=reference)
                return found, self.profiled(name, reference)
            # A table may have a provider that is gone, or a config that its kernel never had.
            if (
                provider is not None
                and config in (configs := provider.configs or ({},))
                and provider.takes(args, kwargs, is_traced)
            ):
                function = provider.kernels[configs.index(config)]
                found = provider._replace(function=function)
                return found, self.profiled(name, self.kernels.prepare(function))
        return None
