"""What a kernel beside the reference has to do: agree with it, and with what is said of it."""

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
from torchop.testing._check.subject import breaks_contract, reason
from torchop.testing.process_state import process_state, restored, seed_all


def only(op: OpOverload, name: str) -> priority:
    """A block in which calls of an operator run the kernel of one provider, if it takes them."""
    return in_order({op.name(): [name]})


def in_order(orders: Any) -> priority:
    """A block with these orders, and whatever else there is around it."""
    return priority(orders, strict=False, batch_invariant_only=False, deterministic_only=False)


def agrees_with_reference(
    op: Any, args: Any, kwargs: Any, provider: str, config: int = 0, **tolerances: Any
) -> None:
    """The kernel of a provider does what the reference does, up to the provider's tolerance.

    A dtype without one has that of `torch.testing.assert_close`; in less than 64 bits, the result
    may also be as far from that in double as twice what the reference is.
    """
    kernel = provider_of(op, provider, args, kwargs)
    call = probes.copies((args, kwargs))
    expected = reference_outcome(op, *call)
    values = tolerances.pop("values", True)
    what = f"the provider {provider!r}"
    if config:
        what += f" with {kernel.configs[config]}"
        call_args = every_argument(Operator(op, "check").schema, args, kwargs)
        try:
            actual = probes.outcome(op, *call_args, function=kernel.kernels[config])
        except Exception as error:
            raise AssertionError(f"{what} raises {reason(error)}.") from error
        actual = actual[: len(expected)]
    else:
        with probes.memory_watched(op, args, kwargs, what), only(op, provider):
            actual = probes.outcome(op, args, kwargs)

    def compare(results: list[Any]) -> None:
        limits = {"tolerance": kernel.tolerance, "values": values, **tolerances}
        probes.assert_same(results, expected, what, **limits)

    try:
        compare(actual)
    except AssertionError:
        if tolerances or len(actual) != len(expected):
            raise
        near = _as_near_as_reference(op, call, actual, expected, kernel.tolerance)
        triples = zip(actual, expected, near, strict=True)
        compare([other if is_near else one for one, other, is_near in triples])


def _as_near_as_reference(
    op: Any, call: Any, actual: list[Any], expected: list[Any], declared: Mapping[Any, Any]
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

    arguments = probes.tensors_of(call)
    wide = probes.mapped(call, lambda t: t.double() if t.dtype.is_floating_point else t)
    try:
        doubles = reference_outcome(op, *wide)
    except Exception:  # the reference does not take double
        return [False] * len(actual)
    return [is_near(*each) for each in zip(actual, expected, doubles, strict=True)]


def reference_outcome(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """What a call comes to with the reference.

    Raises:
        NotImplementedError: the reference refuses it.
    """
    try:
        with only(op, REFERENCE):
            return list(probes.copies(probes.outcome_of_copies(op, args, kwargs)))
    except Exception as error:
        raise NotImplementedError(f"the reference refuses it: {reason(error)}") from error


def provider_of(op: Any, name: str, args: Any, kwargs: Any) -> Provider:
    """The kernel of a provider for the device of a call."""
    device = next((t.device.type for t in probes.tensors_of((args, kwargs))), "cpu")
    found = [each for each in providers_of(op) if each.name == name]
    return min(found, key=lambda each: (device not in each.devices, None not in each.devices))


def gradients_agree(
    op: Any, args: Any, kwargs: Any, provider: str, rtol: float = 1e-4, atol: float = 1e-4
) -> None:
    """With the kernels of a provider, in the backward too, gradients are those of the reference."""
    function, inputs = probes.as_function(op, args, kwargs)
    tolerance = {torch.double: (1e-7, 1e-7), **provider_of(op, provider, args, kwargs).tolerance}
    with in_order({"*": [REFERENCE]}):
        expected = probes.gradients(function, inputs)
    with in_order({"*": [provider]}):  # operators of the formula may have kernels of it, too
        actual = probes.gradients(function, inputs)
    what = f"gradients with the provider {provider!r}"
    probes.assert_same(actual, expected, what, tolerance=tolerance, rtol=rtol, atol=atol)


def supports_is_sound(op: Any, args: Any, kwargs: Any, provider: str, first: Any = None) -> None:
    """`supports` answers what it answered, whatever else there is, and no where the kernel fails.

    `first` is its first answer, if that was not given here.
    """
    operator, kernel = Operator(op, "check"), provider_of(op, provider, args, kwargs)

    def ask(call: Any = (args, kwargs), is_traced: bool = False) -> bool:
        try:
            return kernel.takes(*every_argument(operator.schema, *call), is_traced)
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
                "change nothing, because nobody knows when it is asked."
            )
    for number in range(2, 6):
        expect(f"to question {number} about the same arguments", ask())
    if first is not None:
        answer = first
        expect("to another question about the same arguments", ask())
    expect("about zeros in place of these numbers", ask(_zeros((args, kwargs))))
    for what, change in _SETTINGS.items():
        with restored():
            change()
            expect(what, ask())
    for what, mode, options in (
        ("about fake tensors", fake_tensors.new_fake_mode(), {"static_shapes": True}),
        ("where sizes are symbols", fake_tensors.new_fake_mode(), {}),
    ):
        from_tensor = functools.partial(mode.from_tensor, **options)
        with mode:
            fakes = probes.mapped((args, kwargs), from_tensor)
            expect(what, ask(fakes, is_traced=True))
    if answer:
        reference_outcome(op, args, kwargs)
        try:
            with only(op, provider):
                probes.outcome_of_copies(op, args, kwargs)
        except Exception as error:
            if breaks_contract(error):
                raise
            raise AssertionError(
                f"{operator}: `supports` of the provider {provider!r} takes the call, and the "
                f"kernel raises {reason(error)}. The reference takes it, so `supports` must say no."
            ) from error


def _zeros(call: Any) -> Any:
    """With other values in tensors that have no strides, of which `supports` gets the data."""
    return probes.mapped(call, lambda t: t if probes.is_plain(t) else torch.zeros_like(t))


_SETTINGS: dict[str, Callable[[], object]] = {
    "with another default dtype": functools.partial(torch.set_default_dtype, torch.float64),
    "where gradients are recorded": functools.partial(torch.set_grad_enabled, True),
    "where no gradients are recorded": functools.partial(torch.set_grad_enabled, False),
}


def is_the_same_in_batches(
    op: Any, args: Any, kwargs: Any, provider: str, places: list[int], results: list[int]
) -> None:
    """Rows of `results` have the same bits alone as in batches, wherever they are.

    They are those of the rows of the tensors at `places`.
    """
    operator, kernel = Operator(op, "check"), provider_of(op, provider, args, kwargs)
    rows = len(probes.tensors_of((args, kwargs))[places[0]])

    def batch(count: int, shift: int) -> tuple[Tensor, list[Tensor] | None]:
        index = (torch.arange(count) + shift) % rows
        call = rows_of((args, kwargs), places, index)
        if not kernel.takes(*every_argument(operator.schema, *call)):
            return index, None
        with only(op, provider):
            tensors = probes.tensors_of(probes.outcome(op, *call))
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


def rows_of(call: Any, places: list[int], index: Tensor) -> Any:
    """The call with these rows of the tensors at `places`."""
    tensors = probes.tensors_of(call)
    chosen = [
        t.index_select(0, index.to(t.device)) if place in places else t.clone()
        for place, t in enumerate(tensors)
    ]
    return probes.with_tensors(call, chosen)
