"""The kernels of one device, and the one measured as fastest for a call."""

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
    """The kernels of an operator on one device, with the settings that choose between them.

    Attributes:
        op: the operator's name.
        device: the device type; None for devices without kernels of their own.
        reference: the kernel registered without a provider, or None.
        providers: the other kernels by provider, in the order of registration.
        known: the operator's providers on any device.
        removed: the operator's former providers.
        author: the author's orders, by device type.
        reported: the skipped providers that were reported already; shared by all plans.
        tuning: the author's measurements and buckets.
        prepare: wraps a kernel for a plan.
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
        """Return the measurement for a call; warn if existing measurements cannot be used."""
        digests = {name: tuned.digest(p.written) for name, p in self.providers.items()}
        if self.reference is not None:
            digests[REFERENCE] = tuned.digest(self.reference)
        return tuned.find(self.op, self.tuning, digests, args, kwargs, self.reported)


class TunedKernels(NamedTuple):
    """The candidates of `"tuned"` in an order: the fastest allowed kernel runs."""

    kernels: DeviceKernels
    allowed: Mapping[str, Provider]
    tuner: Tuner | None
    profiled: Callable[[str, Function], Function]

    def measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Measure the kernels for a call inside `torchop.testing.tuning`."""
        if self.tuner is not None:
            self.tuner.measure(self.kernels, args, kwargs)

    def fastest(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool
    ) -> tuple[Provider, Function] | None:
        """Return the fastest measured kernel that supports a call, or None."""
        measurement, reference = self.kernels.measured(args, kwargs), self.kernels.reference
        for name, config, *_ in () if measurement is None else measurement.kernels:
            provider = self.allowed.get(name)
            if name == REFERENCE and reference is not None:
                found = TUNED_PROVIDER._replace(name=name, function=reference, written=reference)
                return found, self.profiled(name, reference)
            # The table may name a removed provider, or a config that its kernel no longer has.
            if (
                provider is not None
                and config in (configs := provider.configs or ({},))
                and provider.takes(args, kwargs, is_traced)
            ):
                function = provider.kernels[configs.index(config)]
                found = provider._replace(function=function)
                return found, self.profiled(name, self.kernels.prepare(function))
        return None
