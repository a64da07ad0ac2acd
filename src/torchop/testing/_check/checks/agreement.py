"""Probes of the kernels of providers: they agree with the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
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
from torchop.testing._check.calls import Call, Example, breaks_contract, reason
from torchop.testing.process_state import process_state, restored, seed_all


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
