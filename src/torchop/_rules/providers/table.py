from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torchop._core.definition import NOTHING
from torchop._errors import RedefinitionWarning, warn
from torchop._rules.providers import priority, tuned
from torchop._rules.providers.choice import Choice, choice_by_device
from torchop._rules.providers.priority import ScopedOrders
from torchop._rules.providers.provider import Provider
from torchop._rules.providers.tuned import Tuning
from torchop.extend import OpName

Function = Callable[..., Any]


class ProviderTable(NamedTuple):
    """An operator's providers (alternative kernels), and the settings of the operator's author.

    The table is immutable, except for the set `reported`.

    Attributes:
        by_device: maps each device type to its providers by name. The key None stands for every
            device.
        removed: the names of providers that were removed because their library was closed.
        orders: the default orders of providers that the author set.
        reported: the skipped providers that were already reported to the user.
    """

    by_device: Mapping[str | None, Mapping[str, Provider]]
    removed: frozenset[str]
    orders: ScopedOrders
    reported: set[tuple[str, bool]]
    tuning: Tuning = Tuning()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(name for known in self.by_device.values() for name in known))

    def warn_of_replacing(self, op: OpName, provider: Provider) -> None:
        for device in provider.devices:
            before = self.by_device.get(device, NOTHING).get(provider.name)
            if before is not None and before.site.module != provider.site.module:
                warn(
                    f"{op}: the kernel of the provider {provider.name!r} was registered at "
                    f"{before.site}, and is now replaced by another one at {provider.site}. "
                    "Rename one of the providers.",
                    RedefinitionWarning,
                )

    def adding(self, provider: Provider) -> ProviderTable:
        by_device = dict(self.by_device)
        for device in provider.devices:
            known = by_device.get(device, NOTHING)
            by_device[device] = {**known, provider.name: provider}
        return self._replace(by_device=by_device)

    def without(self, provider: Provider) -> ProviderTable:
        """Return a table without `provider`.

        If another provider has since been registered under the same name, the table keeps that
        provider.
        """
        by_device = {
            device: {name: other for name, other in known.items() if other is not provider}
            for device, known in self.by_device.items()
        }
        # Calls report a skipped provider (an alternative kernel) only once. Forget the earlier
        # report, so that the next call reports that this provider is missing if an order still
        # names it.
        self.reported.difference_update({(provider.name, True), (provider.name, False)})
        return self._replace(by_device=by_device, removed=self.removed | {provider.name})

    def functions(
        self,
        op: OpName,
        references: Mapping[str | None, Function],
        disabled: Collection[str],
        prepare: Callable[[Function], Function],
    ) -> Mapping[str | None, Function]:
        """Return the function to run on each device type: a kernel, or a `Choice` among kernels.

        `references` contains the kernels registered without a provider. `disabled` contains the
        device types that `set_kernel_enabled` has disabled, on which only these kernels may run.
        `prepare` wraps a kernel to check the operator's arguments before calling it.
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
        # If no kernel is registered for this device type, use the kernels for every device.
        providers = {**self.by_device.get(None, NOTHING), **self.by_device.get(device, NOTHING)}
        reference = references.get(device, references.get(None))
        return Choice(op, device, reference, providers, self, prepare)

    def cache_parts(self, op: OpName) -> Iterator[object]:
        """Yield everything that affects a compiler's choice of a kernel to inline.

        These values become part of the cache keys of compiled graphs, so that a change recompiles
        the graphs.
        """
        settings = priority.current()
        yield (settings.batch_invariant_only, settings.deterministic_only)
        for device, known in sorted(self.by_device.items(), key=repr):
            order = priority.active_order(op, device, self.orders, settings).names
            yield (device, order)
            if priority.TUNED in order:
                for each, _ in tuned.known(op, self.tuning.table):
                    kernels = [(k.provider, repr(k.config), k.digest) for k in each.kernels]
                    yield (*each.key, kernels)
            for name, provider in known.items():
                yield (name, provider.function)


NO_PROVIDERS = ProviderTable(NOTHING, frozenset(), NOTHING, set())
