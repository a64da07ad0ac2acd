"""Checks of the kernels that providers register beside the reference of an operator."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torchop import ProviderError, priority
from torchop._compat import fake_tensors
from torchop._rules.providers import every_argument, providers_of
from torchop._rules.providers.priority import REFERENCE
from torchop._rules.providers.provider import Provider
from torchop.extend import Operator, OpOverload
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, breaks_contract, reason
from torchop.testing._check.gradients import needs_formula
from torchop.testing._check.process import is_repeatable
from torchop.testing._check.subject import Case, Details, Subject, Variant
from torchop.testing._check.variants import VARIANTS, each_resized, sizes
from torchop.testing.process_state import process_state, restored, seed_all

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


def only(op: OpOverload, name: str) -> priority:
    """A block in which calls of an operator run the kernel of one provider, if it takes them."""
    return in_order({op.name(): [name]})


def in_order(orders: Any) -> priority:
    """A block with these orders, and whatever else there is around it."""
    return priority(orders, strict=False, batch_invariant_only=False, deterministic_only=False)


def agrees_with_reference(
    call: Call, provider: str, config: int = 0, values: bool = True, **tolerances: Any
) -> None:
    """The kernel of a provider does what the reference does, up to the provider's tolerance.

    A dtype without one has that of `torch.testing.assert_close`; in less than 64 bits, the result
    may also be as far from that in double as twice what the reference is.
    """
    kernel = provider_of(call, provider)
    expected = reference_outcome(call)
    what = f"the provider {provider!r}"
    if config:
        what += f" with {kernel.configs[config]}"
        arguments = every_argument(call.schema, *call.example.copy())
        try:
            actual = probes.outcome(call.op, *arguments, function=kernel.kernels[config])
        except Exception as error:
            raise AssertionError(f"{what} raises {reason(error)}.") from error
        actual = actual[: len(expected)]
    else:
        record = call.record  # of the provider's kernel, because calls run it here
        if record.error is not None:
            raise record.error
        if record.around:
            raise AssertionError(f"{what} wrote into the memory around {record.around}.")
        actual = [*record.outcome]

    def compare(results: list[Any]) -> None:
        limits = {"tolerance": kernel.tolerance, "values": values, **tolerances}
        probes.assert_same(results, expected, what, **limits)

    try:
        compare(actual)
    except AssertionError:
        if tolerances or len(actual) != len(expected):
            raise
        near = _as_near_as_reference(call, actual, expected, kernel.tolerance)
        triples = zip(actual, expected, near, strict=True)
        compare([other if is_near else one for one, other, is_near in triples])


def _as_near_as_reference(
    call: Call, actual: list[Any], expected: list[Any], declared: Mapping[Any, Any]
) -> list[bool]:
    """For each result, whether it is as near to that in double as the reference is, or twice."""

    def is_near(one: Any, other: Any, double: Any) -> bool:
        if not isinstance(one, Tensor) or one.dtype in declared or one.shape != other.shape:
            return False
        if one.dtype is not other.dtype or not one.is_floating_point() or one.itemsize > 4:
            return False
        # Both may round in the dtype of an argument before they compute in that of the result.
        eps = max(torch.finfo(t.dtype).eps for t in (*arguments, one) if t.is_floating_point())
        one, other = one.double(), other.double()
        finite = double.isfinite() & other.isfinite()
        if not finite.any():
            return False
        bound = 2 * (other - double)[finite].abs().max() + 2 * eps * double[finite].abs().max()
        same = torch.isclose(one, other, rtol=eps, atol=0.0, equal_nan=True)
        return bool((((one - double).abs() <= bound) | same).all())

    arguments = call.tensors
    wide = call.example.map(lambda t: t.double() if t.dtype.is_floating_point else t)
    try:
        doubles = reference_outcome(Call(call.op, *wide))
    except Exception:  # the reference does not take double
        return [False] * len(actual)
    return [is_near(*each) for each in zip(actual, expected, doubles, strict=True)]


def reference_outcome(call: Call) -> list[Any]:
    """Return the outcome of a call with the reference.

    Raises:
        NotImplementedError: the reference refuses it.
    """
    if call.reference is None:
        with only(call.op, REFERENCE):
            call.reference = Call(call.op, *call.example).record
    if call.reference.error is not None:
        raise NotImplementedError(f"the reference refuses it: {reason(call.reference.error)}")
    return [*call.reference.outcome]


def provider_of(call: Call, name: str) -> Provider:
    """Return the kernel of a provider for the device of a call."""
    device = next((t.device.type for t in call.tensors), "cpu")
    found = [each for each in providers_of(call.op) if each.name == name]
    return min(found, key=lambda each: (device not in each.devices, None not in each.devices))


def gradients_agree(call: Call, provider: str, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    """With the kernels of a provider, in the backward too, gradients are those of the reference."""
    function, inputs = call.function()
    tolerance = {torch.double: (1e-7, 1e-7), **provider_of(call, provider).tolerance}
    with in_order({"*": [REFERENCE]}):
        expected = probes.gradients(function, inputs)
    with in_order({"*": [provider]}):  # operators of the formula may have kernels of it, too
        actual = probes.gradients(function, inputs)
    what = f"gradients with the provider {provider!r}"
    probes.assert_same(actual, expected, what, tolerance=tolerance, rtol=rtol, atol=atol)


def supports_is_sound(call: Call, provider: str, first: Any = None) -> None:
    """`supports` gives the same answer whatever else happens, and rejects what the kernel does.

    `first` is its first answer, if that was not given here.
    """
    operator, kernel = Operator(call.op, "check"), provider_of(call, provider)

    def ask(example: Any = call.example, is_traced: bool = False) -> bool:
        try:
            return kernel.takes(*every_argument(operator.schema, *example), is_traced)
        except ProviderError as error:
            raise AssertionError(str(error)) from error

    def expect(what: str, actual: bool) -> None:
        if actual is not answer:
            raise AssertionError(
                f"{operator}: `supports` of the provider {provider!r} answers {actual} {what}, and "
                f"{answer} before. Its answer is kept, so it must follow from the arguments alone."
            )

    seed_all(20010)  # which no function sets
    before = process_state()
    answer = ask()
    for name, value in process_state().items():
        if before[name] != value:
            raise AssertionError(
                f"{operator}: `supports` of the provider {provider!r} changes {name}. It must "
                "change nothing, because it is called at any time."
            )
    for number in range(2, 6):
        expect(f"to question {number} about the same arguments", ask())
    if first is not None:
        answer = first
        expect("to another question about the same arguments", ask())
    expect("about zeros in place of these numbers", ask(call.example.map(_zeros)))
    with restored():
        for what, change in _SETTINGS.items():
            change()
            expect(what, ask())
    for what, mode, options in (
        ("about fake tensors", fake_tensors.new_fake_mode(), {"static_shapes": True}),
        ("where sizes are symbols", fake_tensors.new_fake_mode(), {}),
    ):
        from_tensor = functools.partial(mode.from_tensor, **options)
        with mode:
            expect(what, ask(call.example.map(from_tensor), is_traced=True))
    error = call.record.error if answer else None
    if error is not None:
        reference_outcome(call)
        if breaks_contract(error):
            raise error
        raise AssertionError(
            f"{operator}: `supports` of the provider {provider!r} takes the call, and the "
            f"kernel raises {reason(error)}. The reference takes it, so `supports` must say no."
        ) from error


def _zeros(tensor: Tensor) -> Tensor:
    """Other values of a tensor that has no strides, of which `supports` gets the data."""
    return tensor if probes.is_plain(tensor) else torch.zeros_like(tensor)


_SETTINGS: dict[str, Callable[[], object]] = {
    "with another default dtype": functools.partial(torch.set_default_dtype, torch.float64),
    "where gradients are recorded": functools.partial(torch.set_grad_enabled, True),
    "where no gradients are recorded": functools.partial(torch.set_grad_enabled, False),
}


def is_the_same_in_batches(
    call: Call, provider: str, places: list[int], results: list[int]
) -> None:
    """Rows of `results` have the same bits alone as in batches, wherever they are.

    They are those of the rows of the tensors at `places`.
    """
    kernel = provider_of(call, provider)
    rows = len(call.tensors[places[0]])

    def batch(count: int, shift: int) -> tuple[Tensor, list[Tensor] | None]:
        index = (torch.arange(count) + shift) % rows
        example = rows_of(call.example, places, index)
        if not kernel.takes(*every_argument(call.schema, *example)):
            return index, None
        with only(call.op, provider):
            tensors = probes.tensors_of(probes.outcome(call.op, *example))
        return index, [tensors[place].detach() for place in results]

    expected: list[Tensor] | None = None
    alone = 0
    for count in (1, 2, 3, 4, 7, 16, 33, 64, 129):
        if expected is None:
            firsts = [batch(count, row)[1] for row in range(rows)]
            taken = [each for each in firsts if each is not None]
            if len(taken) < rows:
                continue
            expected = [torch.cat([r[:1] for r in each]) for each in zip(*taken, strict=True)]
            alone = count
        for shift in (0, 1):
            index, found = batch(count, shift)
            if found is not None:
                what = f"rows of the provider {provider!r} in a batch of {count}, in place of "
                what += "one alone" if alone == 1 else f"the first of {alone}"
                right = [each[index.to(each.device)] for each in expected]
                probes.assert_same(found, right, what, rtol=0, atol=0)


def rows_of(example: Example, places: list[int], index: Tensor) -> Example:
    """Return the example with these rows of the tensors at `places`."""
    chosen = [
        t.index_select(0, index.to(t.device)) if place in places else t.clone()
        for place, t in enumerate(example.tensors)
    ]
    return example.with_tensors(chosen)


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
        options = {"provider": declared(subject).name}
        with contextlib.suppress(ProviderError):
            taken = subject.provider.takes(
                *every_argument(subject.schema, *subject.call(case).example)
            )
            options["first"] = taken
        made = Case(case.label, case.example, case.arrange, case.group, supports_is_sound, options)
        yield subject.known(dataclasses.replace(made, calls=False), subject.call(case))


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
