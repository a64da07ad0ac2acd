"""The kernels that an operator has on one device, and the choice of the fastest one."""

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
    """An operator's kernels on one device, and the settings of the author (see `ProviderTable`).

    Attributes:
        device: the device type. None stands for all devices that have no kernel of their own.
        reference: the kernel that was registered without a provider, if there is one.
        providers: the providers on this device by name, in the order of registration.
        known: the names of all providers of the operator, including those for other devices.
        prepare: wraps a kernel to check the operator's arguments before calling it.
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
        digests = {name: tuned.digest(p.written) for name, p in self.providers.items()}
        if self.reference is not None:
            digests[REFERENCE] = tuned.digest(self.reference)
        return tuned.find(self.op, self.tuning, digests, args, kwargs, self.reported)


class TunedKernels(NamedTuple):
    """The kernels that `"tuned"` in an order of providers can select.

    `allowed` contains only the providers that the open `torchop.priority` blocks allow. `tuner`
    measures the kernels during a call, inside a `torchop.testing.tuning` block. `profiled` wraps a
    kernel so that profiles show the name of the provider.
    """

    kernels: DeviceKernels
    allowed: Mapping[str, Provider]
    tuner: Tuner | None
    profiled: Callable[[str, Function], Function]

    def measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self.tuner is not None:
            self.tuner.measure(self.kernels, args, kwargs)

    def fastest(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool
    ) -> tuple[Provider, Function] | None:
        measurement, reference = self.kernels.measured(args, kwargs), self.kernels.reference
        for name, config, *_ in () if measurement is None else measurement.kernels:
            provider = self.allowed.get(name)
            if name == REFERENCE and reference is not None:
                found = TUNED_PROVIDER._replace(name=name, function=reference, written=reference)
                return found, self.profiled(name, reference)
            # The stored measurement may name a provider or config that no longer exists or does not
            # support this call.
            if (
                provider is not None
                and config in (configs := provider.configs or ({},))
                and provider.takes(args, kwargs, is_traced)
            ):
                function = provider.kernels[configs.index(config)]
                found = provider._replace(function=function)
                return found, self.profiled(name, self.kernels.prepare(function))
        return None
