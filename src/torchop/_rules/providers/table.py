"""The table of the providers of an operator, and the functions that its call plan gets of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchop._core.definition import NOTHING
from torchop._errors import RedefinitionWarning, warn
from torchop._rules.providers import priority, tuned
from torchop._rules.providers.candidates import DeviceKernels
from torchop._rules.providers.choice import Choice, choice_by_device
from torchop._rules.providers.priority import Order
from torchop._rules.providers.provider import Provider
from torchop._rules.providers.tuned import Tuning
from torchop.extend import OpName

Function = Callable[..., Any]


class ProviderTable(NamedTuple):
    """The providers of an operator, and the orders of its author; replaced, never changed.

    Attributes:
        by_device: by device type, None standing for all, the providers by name.
        removed: the names of those that it had once.
        orders: the author's orders, by device type.
        reported: what was said of providers that were passed by.
        tuning: what the author says about measurements.
    """

    by_device: Mapping[str | None, Mapping[str, Provider]]
    removed: frozenset[str]
    orders: Mapping[str | None, Order]
    reported: set[tuple[str, bool]]
    tuning: Tuning = Tuning()

    @property
    def names(self) -> list[str]:
        """Those of the providers, in the order in which they were registered."""
        return list(dict.fromkeys(name for known in self.by_device.values() for name in known))

    def adding(self, op: OpName, provider: Provider) -> ProviderTable:
        """With a provider, in place of the one of its name; warns if that is of another module."""
        by_device = dict(self.by_device)
        for device in provider.devices:
            known = by_device.get(device, NOTHING)
            before = known.get(provider.name)
            if before is not None and before.site.module != provider.site.module:
                warn(
                    f"{op}: the kernel of the provider {provider.name!r} was registered at "
                    f"{before.site} and is registered again at {provider.site}, which replaces it. "
                    "Give one of them another name.",
                    RedefinitionWarning,
                )
            by_device[device] = {**known, provider.name: provider}
        return self._replace(by_device=by_device)

    def without(self, provider: Provider) -> ProviderTable:
        """Without a provider, unless there is another one in its place."""
        by_device = {
            device: {name: other for name, other in known.items() if other is not provider}
            for device, known in self.by_device.items()
        }
        # That it is gone is said, also of one that was passed by for another reason before.
        self.reported.difference_update({(provider.name, True), (provider.name, False)})
        return self._replace(by_device=by_device, removed=self.removed | {provider.name})

    def ordered(self, order: Order, devices: Sequence[str | None]) -> ProviderTable:
        """With an order of the author on these devices."""
        return self._replace(orders={**self.orders, **dict.fromkeys(devices, order)})

    def functions(
        self,
        op: OpName,
        references: Mapping[str | None, Function],
        disabled: Collection[str],
        prepare: Callable[[Function], Function],
    ) -> Mapping[str | None, Function]:
        """The functions of a plan, by device type, given those of the reference.

        Args:
            op: the operator.
            references: by device type, the kernels that were registered without a provider.
            disabled: the device types for which no other kernel is to run.
            prepare: what a plan does to every kernel.
        """
        functions = dict(references)
        for device in dict.fromkeys((*references, *self.by_device)):
            if device in disabled:
                reference = references.get(device, references.get(None))
                if reference is not None:
                    functions[device] = reference
                continue
            chosen = self.choice(op, device, references, prepare).function()
            special = priority.devices_with_orders(op, self.orders) if device is None else ()
            if special:
                choices = {
                    name: self.choice(op, name, references, prepare).function() for name in special
                }
                chosen = choice_by_device(choices, chosen)
            functions[device] = chosen
        return functions

    def choice(
        self,
        op: OpName,
        device: str | None,
        references: Mapping[str | None, Function],
        prepare: Callable[[Function], Function],
    ) -> Choice:
        """What chooses for calls on a device; the rest is as in `functions`."""
        # The kernels for every device serve those that have none of their own.
        at = device if device in references or device in self.by_device else None
        providers = {**self.by_device.get(None, NOTHING), **self.by_device.get(at, NOTHING)}
        reference = references.get(at, references.get(None))
        return Choice(
            DeviceKernels(
                op,
                device,
                reference,
                providers,
                self.names,
                self.removed,
                self.orders,
                self.reported,
                self.tuning,
                prepare,
            )
        )

    def cache_parts(self, op: OpName) -> Iterator[object]:
        """What decides which kernel a compiler traces: the kernels, and the orders in force."""
        settings = priority.current()
        yield (settings.batch_invariant_only, settings.deterministic_only)
        for device, known in sorted(self.by_device.items(), key=repr):
            order = priority.active_order(op, device, self.orders, settings).names
            yield (device, order)
            if priority.TUNED in order:
                yield tuned.known(op, self.tuning)
            for name, provider in known.items():
                yield (name, provider.function)


NO_PROVIDERS = ProviderTable(NOTHING, frozenset(), NOTHING, set())
