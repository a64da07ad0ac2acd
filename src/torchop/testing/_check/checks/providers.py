"""Checks of providers, i.e. of alternative kernels of an operator."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from torchop import ProviderError
from torchop._rules.providers import providers_of
from torchop._rules.providers.priority import REFERENCE
from torchop._rules.providers.provider import Provider
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck
from torchop.testing._check.cases import Case, Details, Variant
from torchop.testing._check.checks.agreement import (
    agrees_with_reference,
    gradients_agree,
    is_the_same_in_batches,
    only,
    preferred,
    supports_is_sound,
)
from torchop.testing._check.checks.gradients import needs_formula
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS
from torchop.testing.process_state import restored


def of_providers(subject: Subject) -> Iterator[Subject]:
    device = next((t.device.type for each in subject.examples for t in each.tensors), "cpu")
    kernels: dict[str, list[Provider]] = {}
    for provider in providers_of(subject.op):
        kernels.setdefault(provider.name, []).append(provider)
    for several in kernels.values():
        provider = preferred(several, device)
        devices = ", ".join(str(name) for each in several for name in each.devices)
        unsupported = (
            provider.why_unsupported() or ""
            if {device, None}.intersection(provider.devices)
            else f"it is for {devices}, and the examples are on {device}"
        )
        made = subject.with_provider(provider, unsupported)
        pairs = provider.tolerance.values()
        if pairs:  # even two calls of this kernel may differ by its declared tolerance
            limits = map(max, zip(*pairs, strict=True))
            made.tolerances = dict(zip(("rtol", "atol"), limits, strict=True))
        yield made


def order_of(subject: Subject) -> str | None:
    """Return the name of the provider under test, or None if the operator has no providers.

    If the reference kernel is under test, return the name by which priorities refer to it.
    """
    if subject.provider is not None:
        return subject.provider.name
    return REFERENCE if providers_of(subject.op) else None


def ordered(subject: Subject) -> contextlib.AbstractContextManager[None]:
    """Return a context manager in which the operator runs only the kernel under test."""
    name = order_of(subject)
    return contextlib.nullcontext() if name is None else only(subject.op, name)


# Leave out "extremes", because a sum of extreme numbers may overflow in one kernel but not in
# another that adds them in a different order.
_COMPARED = [
    variant
    for name, variant in VARIANTS.items()
    if name not in ("extremes", "precisions", "half_digits", "longer", "block")
]


def declared(subject: Subject) -> Provider:
    """Return the provider under test, or raise CannotCheck if the operator has none."""
    if subject.provider is None:
        raise CannotCheck("the operator has no provider")
    return subject.provider


def compared(subject: Subject, details: Details) -> Iterator[Case]:
    """Yield the cases of all variants, after recording each call with the reference kernel."""
    base = subject.of_reference
    declared(subject)
    for variant in _COMPARED:
        for case in _cases(base, variant):
            with contextlib.suppress(CannotCheck):
                with ordered(base), restored():
                    subject.call(case).reference = base.call(case).record
                yield case


def _cases(base: Subject, variant: Variant) -> list[Case]:
    found: list[Case] = []
    with ordered(base), contextlib.suppress(CannotCheck):
        found.extend(base.cases(variant))
    return found


def provider_options(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    values = {"values": False} if subject.is_random else {}
    return {"provider": declared(subject).name, **values, **subject.of_reference.tolerances}


def agrees(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the provider agree with the reference, for all variants?"""
    return compared(subject, details)


def supports(subject: Subject, details: Details) -> Iterator[Case]:
    """Does `supports` depend only on arguments, and reject calls that the kernel rejects?"""
    provider = declared(subject)
    if provider.accepts is None:
        details["supports"] = "not defined, so the kernel must support all calls of the reference"
    for case in compared(subject, details):
        call, options = subject.call(case), dict[str, Any](provider=provider.name)
        with contextlib.suppress(ProviderError):
            options["first"] = provider.takes(*subject.schema.fill_defaults(*call.example))
        made = dataclasses.replace(case, probe=supports_is_sound, options=options, calls=False)
        yield subject.known(made, call)


def configs(subject: Subject, details: Details) -> Iterator[Case]:
    """Do all configurations of the kernel agree with the reference?"""
    for config in range(1, len(declared(subject).configs)):
        for case in compared(subject, details):
            options = {**provider_options(subject, case, subject.call(case)), "config": config}
            label = f"{case.label}, config {config}"
            made = Case(
                label, case.example, case.arrange, case.group, agrees_with_reference, options
            )
            yield subject.known(made, subject.call(case))


def gradients(subject: Subject, details: Details) -> Iterator[Case]:
    """Are gradients the same with the provider's kernels as with the reference kernel?"""
    options = {"provider": declared(subject).name}
    with ordered(subject.of_reference):
        needs_formula(subject.of_reference)
    subject.needs_fixed_results()
    for example in subject.trainable_examples:
        yield Case("the example", example, None, "gradient", gradients_agree, options)


def batch_invariant(subject: Subject, details: Details) -> Iterator[Case]:
    """Is the result for a row the same, bit for bit, alone and in a batch?"""
    provider = declared(subject).name
    subject.needs_fixed_results()
    for example in subject.accepted():
        tensors = enumerate(example.tensors)
        lengths = {n: len(t) for n, t in tensors if probes.is_plain(t) and t.dim()}
        rows = next(iter(lengths.values()), 0)
        # Assume that the first dimension is the batch dimension in every tensor whose first
        # dimension has the same size as that of the first tensor.
        batched = [n for n, length in lengths.items() if length == rows]
        if rows:
            options = {"provider": provider, "batched": batched}
            yield Case("rows", example, None, "plain", is_the_same_in_batches, options)
