"""Checks of providers: each kernel beside the reference, and what it says of itself."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop import ProviderError
from torchop._rules.providers import every_argument, providers_of
from torchop._rules.providers.priority import REFERENCE
from torchop._rules.providers.provider import Provider
from torchop.testing import probes
from torchop.testing._check import dtypes, integers, memory, sharing, values
from torchop.testing._check.contracts import is_repeatable
from torchop.testing._check.kinds import CheckKind, Details, family
from torchop.testing._check.providers.agreement import (
    agrees_with_reference,
    gradients_agree,
    is_the_same_in_batches,
    only,
    reference_outcome,
    rows_of,
    supports_is_sound,
)
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject
from torchop.testing._check.subsystems.gradients import needs_formula
from torchop.testing._check.variants import BLOCKS, each_resized, larger_sizes, sizes, sizes_changed

# --------------------------------------------------------------------------------------------------
# The kernels of an operator


def of_providers(subject: Subject) -> Iterator[Subject]:
    """The same operator with the kernel of each of its providers, one for each name."""
    device = next((t.device.type for each in subject.examples for t in each.tensors), "cpu")
    kernels: dict[str, list[Provider]] = {}
    for provider in providers_of(subject.op):
        kernels.setdefault(provider.name, []).append(provider)
    for several in kernels.values():
        # A kernel for the device is chosen before one for every device.
        fitting = [p for p in several if device in p.devices]
        fitting = fitting or [p for p in several if None in p.devices]
        under = copy.copy(subject)  # of which nothing is known yet that the kernel decides
        under.provider = provider = (fitting or several)[-1]
        devices = ", ".join(str(name) for each in several for name in each.devices)
        under.unsupported = (
            provider.why_unsupported() or ""
            if fitting
            else f"it is for {devices}, and the examples are on {device}"
        )
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


# What is checked of each provider, beside the checks that are about providers. Everything else
# belongs to the operator, and is checked with its reference.
_OF_KERNELS = frozenset(
    (
        *("contracts.schema", "contracts.kept", "contracts.leaks", "contracts.process"),
        *("contracts.num_threads", "memory.uninitialized", "memory.blocks", "subsystems.fake"),
    )
)
_OF_DETERMINISTIC_KERNELS = frozenset(
    ("contracts.state", "providers.deterministic", "subsystems.threads")
)


def is_about(kind: CheckKind, provider: Provider) -> bool:
    """Whether a check says something of the kernel of a provider."""
    if_declared = {
        "providers.batch_invariant": provider.batch_invariant,
        "providers.configs": len(provider.configs) > 1,
        **dict.fromkeys(_OF_DETERMINISTIC_KERNELS, provider.deterministic),
    }
    return if_declared.get(kind.name, kind.name in _OF_KERNELS or is_of_providers(kind))


def is_of_providers(kind: CheckKind) -> bool:
    """Whether a check is about providers alone."""
    return kind.name.startswith("providers.")


# --------------------------------------------------------------------------------------------------
# Cases


def supports(subject: Subject, details: Details) -> Iterator[Case]:
    """Does `supports` follow from the arguments alone, and say no where the kernel fails?"""
    provider = _declared(subject)
    if provider.accepts is None:
        details["supports"] = "not there, so it must take all that the reference takes"

    def first(example: Example) -> dict[str, Any]:
        try:
            return {
                "provider": provider.name,
                "first": provider.takes(*every_argument(subject.schema, *example)),
            }
        except ProviderError:
            return {"provider": provider.name}

    for case in _inputs(subject):
        yield Case(case.label, supports_is_sound, case.example, case.arrange, first, calls=False)


def agrees(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the kernel do what the reference does, on the inputs of all checks?"""
    yield from _compared(subject)


def _compared(subject: Subject, config: int = 0) -> Iterator[Case]:
    options: dict[str, Any] = {"provider": _declared(subject).name}
    options |= {"config": config} if config else {}
    options |= {"values": False} if subject.is_random else {}
    options |= subject.of_reference.tolerances
    label = f", config {config}" if config else ""
    for case in _inputs(subject):
        yield Case(case.label + label, agrees_with_reference, case.example, case.arrange, options)


def configs(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do so with each of its configs?"""
    for config in range(1, len(_declared(subject).configs)):
        yield from _compared(subject, config)


def gradients(subject: Subject, details: Details) -> Iterator[Case]:
    """Are gradients with the kernels of the provider, also of the backward, the reference's?"""
    options = {"provider": _declared(subject).name}
    with ordered(subject.of_reference):
        needs_formula(subject.of_reference)
    subject.needs_fixed_results()
    for example in subject.trainable_examples:
        yield Case("the example", gradients_agree, example, options=options)


def deterministic(subject: Subject, details: Details) -> Iterator[Case]:
    """Do equal calls have equal bits?"""
    _declared(subject)
    for example in subject.accepted():
        yield Case("repeated calls", is_repeatable, example)
        results = probes.tensors_of(subject.first_results(example))
        changes = larger_sizes(example, BLOCKS, results)
        for change, larger in each_resized(example, *changes, subject=subject):
            yield Case(sizes_changed(change), is_repeatable, larger)


def batch_invariant(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a row alone have the same bits as in batches of several sizes, at each position?"""
    provider = _declared(subject)
    subject.needs_fixed_results()
    for example in _accepted(subject):
        wide = [{size: 257} for size in sizes(example) if 1 < size < 257]
        for _, resized in each_resized(example, {}, *wide, subject=subject):
            each = _distinct(subject, resized)
            places, results = _places_of_rows(subject, each)
            if results:
                options = {"provider": provider.name, "places": places, "results": results}
                yield Case("rows", is_the_same_in_batches, each, options=options, shrink=False)
    raise CannotCheck("with the reference, no row of a result is that of rows of the arguments")


def _distinct(subject: Subject, example: Example) -> Example:
    """The example with other numbers in each row, as far as the kernel takes that."""

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
        calls = [rows_of(tuple(example), places, index) for index in counts]
        if not all(subject.of_reference.is_valid(Example(*call)) for call in calls):
            return []
        found = [probes.tensors_of(reference_outcome(subject.op, *call)) for call in calls]
        kept = [n for n, result in enumerate(found[0]) if result.shape[:1] == (length,)]
        for index, results in zip(counts, found, strict=True):
            expected = [found[0][n][index] for n in kept]
            probes.assert_same([results[n] for n in kept], expected, "", rtol=1e-3, atol=1e-3)
    except Exception:
        return []
    return kept


# --------------------------------------------------------------------------------------------------
# Inputs


def _declared(subject: Subject) -> Provider:
    if subject.provider is None:
        raise CannotCheck("it has no provider beside the reference")
    return subject.provider


# Whether extreme numbers cancel or overflow depends on the order in which they are added.
_NOT_COMPARED = ("values.extremes",)


def _inputs(subject: Subject) -> list[Case]:
    """The calls of the checks of inputs, as they are made for the reference."""
    base = subject.of_reference
    if base.inputs is None:
        found: list[Case] = []
        with ordered(base):  # all at once, as a generator would not leave the block
            for kind in (k for f in (memory, dtypes, values, integers, sharing) for k in f.CHECKS):
                if not kind.is_costly and kind.name not in _NOT_COMPARED:
                    with contextlib.suppress(CannotCheck):  # why there are no more cases
                        for case in kind.cases(base, {}):
                            found.append(
                                Case(
                                    f"{kind.name}: {case.label}",
                                    case.probe,
                                    case.example,
                                    case.arrange,
                                )
                            )
        base.inputs = found
    return base.inputs


def _accepted(subject: Subject) -> list[Example]:
    """The first examples that the kernel takes, or else the first of all inputs."""
    with contextlib.suppress(CannotCheck):
        return subject.accepted()
    found: list[Example] = []
    for case in _inputs(subject):
        with contextlib.suppress(CannotCheck):
            example, _ = case.arguments()
            if subject.refusal(example) is None:
                found.append(example)
        if len(found) == 3:
            break
    return found


CHECKS = family("providers", supports, agrees, configs, gradients, deterministic, batch_invariant)
