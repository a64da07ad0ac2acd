"""Checks of the kernels that providers register beside the reference of an operator."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop import ProviderError
from torchop._rules.providers import every_argument, providers_of
from torchop._rules.providers.priority import REFERENCE
from torchop._rules.providers.provider import Provider
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example
from torchop.testing._check.cases import Case, Details, Variant
from torchop.testing._check.checks.agreement import (
    agrees_with_reference,
    gradients_agree,
    is_the_same_in_batches,
    only,
    reference_outcome,
    rows_of,
    supports_is_sound,
)
from torchop.testing._check.checks.gradients import needs_formula
from torchop.testing._check.checks.process import is_repeatable
from torchop.testing._check.sizes import each_resized, sizes
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS
from torchop.testing.process_state import restored

# --------------------------------------------------------------------------------------------------
# The kernels of an operator


def of_providers(subject: Subject) -> Iterator[Subject]:
    """Yield the subject with the kernel of each of its providers, one for each name."""
    device = next((t.device.type for each in subject.examples for t in each.tensors), "cpu")
    kernels: dict[str, list[Provider]] = {}
    for provider in providers_of(subject.op):
        kernels.setdefault(provider.name, []).append(provider)
    for several in kernels.values():
        # A kernel for the device is chosen before one for every device.
        fitting = [p for p in several if device in p.devices]
        fitting = fitting or [p for p in several if None in p.devices]
        provider = (fitting or several)[-1]
        devices = ", ".join(str(name) for each in several for name in each.devices)
        unsupported = (
            provider.why_unsupported() or ""
            if fitting
            else f"it is for {devices}, and the examples are on {device}"
        )
        under = subject.under(provider, unsupported)
        pairs = provider.tolerance.values()
        if pairs:  # where the kernel is compared with itself, with other settings
            limits = map(max, zip(*pairs, strict=True))
            under.tolerances = dict(zip(("rtol", "atol"), limits, strict=True))
        yield under


def order_of(subject: Subject) -> str | None:
    """The provider whose kernel is checked; None for an operator with one kernel."""
    if subject.provider is not None:
        return subject.provider.name
    return REFERENCE if providers_of(subject.op) else None


def ordered(subject: Subject) -> contextlib.AbstractContextManager[None]:
    """A block in which calls run the kernel that is checked."""
    name = order_of(subject)
    return contextlib.nullcontext() if name is None else only(subject.op, name)


# --------------------------------------------------------------------------------------------------
# Cases

# The variants with which kernels are compared with the reference. Whether the largest numbers
# cancel or overflow depends on the order in which they are added.
_COMPARED = [
    variant
    for name, variant in VARIANTS.items()
    if name not in ("extremes", "precisions", "half_digits", "longer")
]


def declared(subject: Subject) -> Provider:
    """Return the provider whose kernel is checked; raise CannotCheck if there is none."""
    if subject.provider is None:
        raise CannotCheck("it has no provider beside the reference")
    return subject.provider


def compared(subject: Subject, details: Details) -> Iterator[Case]:
    """Yield the calls of all variants, with the record of the reference for each."""
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
    with ordered(base), contextlib.suppress(CannotCheck):  # why there are no more cases
        found.extend(base.cases(variant))
    return found


def provider_options(subject: Subject, case: Case, call: Call) -> dict[str, Any]:
    """Return the options of a comparison of a provider's kernel with the reference."""
    values = {"values": False} if subject.is_random else {}
    return {"provider": declared(subject).name, **values, **subject.of_reference.tolerances}


def agrees(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the kernel do what the reference does, on the calls of all variants?"""
    return compared(subject, details)


def supports(subject: Subject, details: Details) -> Iterator[Case]:
    """Does `supports` follow from the arguments alone, and say no where the kernel fails?"""
    provider = declared(subject)
    if provider.accepts is None:
        details["supports"] = "not there, so it must take all that the reference takes"
    for case in compared(subject, details):
        call, options = subject.call(case), dict[str, Any](provider=provider.name)
        with contextlib.suppress(ProviderError):
            options["first"] = provider.takes(*every_argument(subject.schema, *call.example))
        made = dataclasses.replace(case, probe=supports_is_sound, options=options, calls=False)
        yield subject.known(made, call)


def configs(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the kernel do the same with each of its configurations?"""
    for config in range(1, len(declared(subject).configs)):
        for case in compared(subject, details):
            options = {**provider_options(subject, case, subject.call(case)), "config": config}
            label = f"{case.label}, config {config}"
            made = Case(
                label, case.example, case.arrange, case.group, agrees_with_reference, options
            )
            yield subject.known(made, subject.call(case))


def gradients(subject: Subject, details: Details) -> Iterator[Case]:
    """Are gradients with the kernels of the provider, also of the backward, the reference's?"""
    options = {"provider": declared(subject).name}
    with ordered(subject.of_reference):
        needs_formula(subject.of_reference)
    subject.needs_fixed_results()
    for example in subject.trainable_examples:
        yield Case("the example", example, None, "gradient", gradients_agree, options)


def deterministic(subject: Subject, details: Details) -> Iterator[Case]:
    """Do equal calls have equal bits?"""
    declared(subject)
    for name in ("plain", "blocks"):
        with contextlib.suppress(CannotCheck):
            for case in subject.cases(VARIANTS[name]):
                yield dataclasses.replace(case, probe=is_repeatable)


def batch_invariant(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a row alone have the same bits as in batches of several sizes, at each position?"""
    provider = declared(subject).name
    subject.needs_fixed_results()
    for example in _accepted(subject):
        wide = [{size: 257} for size in sizes(example) if 1 < size < 257]
        for _, resized in each_resized(example, {}, *wide):
            each = _distinct(subject, resized)
            places, results = _places_of_rows(subject, each)
            if results:
                options = {"provider": provider, "places": places, "results": results}
                yield Case(
                    "rows", each, probe=is_the_same_in_batches, options=options, shrink=False
                )
    raise CannotCheck("with the reference, no row of a result is that of rows of the arguments")


def _accepted(subject: Subject) -> list[Example]:
    """The first examples that the kernel takes, or else the first of all variants."""
    with contextlib.suppress(CannotCheck):
        return subject.accepted()
    taken = (
        subject.call(case).example
        for case in compared(subject, {})
        if subject.declined(subject.call(case).example) is None
    )
    return [*itertools.islice(taken, 3)]


def _distinct(subject: Subject, example: Example) -> Example:
    """Return the example with other numbers in each row, as far as the kernel takes that."""

    def change(tensor: Tensor) -> Tensor:
        if not probes.is_plain(tensor) or not tensor.is_floating_point():
            return tensor
        noise = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(subject.seed))
        return tensor * (1 + noise).to(tensor)

    changed = example.map(change)
    return changed if subject.refusal(changed) is None else example


def _places_of_rows(subject: Subject, example: Example) -> tuple[list[int], list[int]]:
    """Tensors, and the results of the reference whose rows are those of theirs, if there are."""
    tensors = example.tensors
    lengths = dict.fromkeys(len(t) for t in tensors if probes.is_plain(t) and t.dim())
    for length in filter(None, lengths):
        every = [
            p for p, t in enumerate(tensors) if probes.is_plain(t) and t.shape[:1] == (length,)
        ]
        for places in ([every] if len(every) > 1 else []) + [[place] for place in every]:
            if results := _results_by_rows(subject, example, places, length):
                return places, results
    return [], []


def _results_by_rows(
    subject: Subject, example: Example, places: list[int], length: int
) -> list[int]:
    try:
        counts = torch.arange(length), torch.tensor([0]), torch.arange(2 * length + 1) % length
        calls = [rows_of(example, places, index) for index in counts]
        if not all(map(subject.is_valid, calls)):
            return []
        outcomes = [reference_outcome(Call(subject.op, *call)) for call in calls]
        found = [probes.tensors_of(outcome) for outcome in outcomes]
        kept = [n for n, result in enumerate(found[0]) if result.shape[:1] == (length,)]
        for index, results in zip(counts, found, strict=True):
            expected = [found[0][n][index] for n in kept]
            probes.assert_same([results[n] for n in kept], expected, "", rtol=1e-3, atol=1e-3)
    except Exception:
        return []
    return kept
