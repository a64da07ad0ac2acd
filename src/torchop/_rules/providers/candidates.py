"""An operator's kernels on one device, and which of them was measured as the fastest."""

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
    """An operator's kernels on one device, with the settings that the operator's author made.

    Attributes:
        op: the name of the operator.
        device: the device type. None stands for all devices without their own kernels.
        reference: the kernel registered without a provider, or None.
        providers: the providers by name, in the order of registration.
        known: the names of the operator's providers for any device.
        removed: the names of providers that were removed.
        author: the author's order of providers for each device type.
        reported: the skipped providers that were already reported. All call plans share this set.
        tuning: the measurements and buckets that the author set.
        prepare: wraps a kernel before it becomes part of a call plan.
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
        """Return the measurement for a call, or None. If the measurement is outdated, warn."""
        digests = {name: tuned.digest(p.written) for name, p in self.providers.items()}
        if self.reference is not None:
            digests[REFERENCE] = tuned.digest(self.reference)
        return tuned.find(self.op, self.tuning, digests, args, kwargs, self.reported)


class TunedKernels(NamedTuple):
    """The kernels that `"tuned"`, as an entry of an order of providers, may select.

    Attributes:
        kernels: the kernels of the device.
        allowed: the providers, by name, that the open `torchop.priority` blocks allow.
        tuner: measures calls inside `torchop.testing.tuning`, or None.
        profiled: wraps a kernel to label it in profiles.
    """

    kernels: DeviceKernels
    allowed: Mapping[str, Provider]
    tuner: Tuner | None
    profiled: Callable[[str, Function], Function]

    def measure(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """If a call is made inside `torchop.testing.tuning`, measure the kernels for it."""
        if self.tuner is not None:
            self.tuner.measure(self.kernels, args, kwargs)

    def fastest(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], is_traced: bool
    ) -> tuple[Provider, Function] | None:
        """Return the fastest kernel that supports a call, or None if there is no measurement."""
        measurement, reference = self.kernels.measured(args, kwargs), self.kernels.reference
        for name, config, *_ in () if measurement is None else measurement.kernels:
            provider = self.allowed.get(name)
            if name == REFERENCE and reference is not None:
                found = TUNED_PROVIDER._replace(name=name, function=reference, written=reference)
                return found, self.profiled(name, reference)
            # The measurement may name a provider or a config that has been removed since.
            if (
                provider is not None
                and config in (configs := provider.configs or ({},))
                and provider.takes(args, kwargs, is_traced)
            ):
                function = provider.kernels[configs.index(config)]
                found = provider._replace(function=function)
                return found, self.profiled(name, self.kernels.prepare(function))
        return None
