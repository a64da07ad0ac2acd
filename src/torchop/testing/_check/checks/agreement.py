"""Probes that compare providers, i.e. alternative kernels of an operator, with the reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop import ProviderError, priority
from torchop._compat import fake_tensors
from torchop._rules.providers import providers_of
from torchop._rules.providers.priority import REFERENCE
from torchop._rules.providers.provider import Provider
from torchop.extend import Operator, OpOverload
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, breaks_contract, reason
from torchop.testing.process_state import process_state, restored, seed_all


def only(op: OpOverload, name: str) -> priority:
    """Return a context manager in which the operator prefers the kernel of one provider.

    If the provider does not support a call, the operator falls back to another kernel.
    """
    return in_order({op.name(): [name]})


def in_order(orders: Any) -> priority:
    """Return a `torchop.priority` block that sets these orders of providers.

    The block lifts the restrictions of enclosing blocks, such as `deterministic_only`.
    """
    return priority(orders, strict=False, batch_invariant_only=False, deterministic_only=False)


def agrees_with_reference(
    call: Call, provider: str, config: int = 0, values: bool = True, **tolerances: Any
) -> None:
    """Check that the kernel of a provider agrees with the reference, up to a tolerance.

    The tolerances default to those of `torch.testing.assert_close`. With the default tolerances, a
    result in float32 or a smaller dtype may differ more, as long as its error is at most twice the
    error of the reference kernel. To measure both errors, compare with the result of the reference
    kernel in double.
    """
    kernel = provider_of(call, provider)
    expected = reference_outcome(call)
    what = f"the provider {provider!r}"
    if config:
        what += f" with {kernel.configs[config]}"
        arguments = call.schema.fill_defaults(*call.example.copy())
        try:
            actual = probes.outcome(call.op, *arguments, function=kernel.kernels[config])
        except Exception as error:
            raise AssertionError(f"{what} raises {reason(error)}.") from error
        actual = actual[: len(expected)]
    else:
        record = call.record  # runs the provider's kernel, because the caller has set the priority
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
    """Return for each result whether its error is at most twice the reference's error."""

    def is_near(one: Any, other: Any, double: Any) -> bool:
        if not isinstance(one, Tensor) or one.dtype in declared or one.shape != other.shape:
            return False
        if one.dtype is not other.dtype or not one.is_floating_point() or one.itemsize > 4:
            return False
        # Either kernel may round intermediate values to the dtype of any argument, so use the
        # precision of the least precise dtype.
        eps = max(torch.finfo(t.dtype).eps for t in (*arguments, one) if t.is_floating_point())
        one, other = one.double(), other.double()
        finite = double.isfinite() & other.isfinite()
        if not finite.any():
            return False
        bound = 2 * (other - double)[finite].abs().max() + 2 * eps * double[finite].abs().max()
        same = torch.isclose(one, other, rtol=eps, atol=0.0, equal_nan=True)
        return bool((((one - double).abs() <= bound) | same).all())

    arguments = call.tensors
    try:
        wide = call.changed(lambda t: t.double() if t.dtype.is_floating_point else t)
        doubles = reference_outcome(Call(call.op, *wide))
    except Exception:  # the reference does not support double
        return [False] * len(actual)
    return [is_near(*each) for each in zip(actual, expected, doubles, strict=True)]


def reference_outcome(call: Call) -> list[Any]:
    """Return the outcome of the same call with the reference kernel.

    Raise NotImplementedError if the reference rejects the arguments, so that the case is skipped.
    """
    if call.reference is None:
        with only(call.op, REFERENCE):
            call.reference = Call(call.op, *call.example).record
    if call.reference.error is not None:
        raise NotImplementedError(f"the reference refuses it: {reason(call.reference.error)}")
    return [*call.reference.outcome]


def provider_of(call: Call, name: str) -> Provider:
    device = next((t.device.type for t in call.tensors), "cpu")
    return preferred([each for each in providers_of(call.op) if each.name == name], device)


def preferred(providers: Sequence[Provider], device: str) -> Provider:
    """Return the provider for a device type, or else a provider for all device types."""
    return min(providers, key=lambda each: (device not in each.devices, None not in each.devices))


def gradients_agree(call: Call, provider: str, rtol: float = 1e-4, atol: float = 1e-4) -> None:
    function, inputs = call.function()
    tolerance = {torch.double: (1e-7, 1e-7), **provider_of(call, provider).tolerance}
    with in_order({"*": [REFERENCE]}):
        expected = probes.gradients(function, inputs)
    with in_order({"*": [provider]}):  # "*" includes the operators that the formula calls
        actual = probes.gradients(function, inputs)
    what = f"gradients with the provider {provider!r}"
    probes.assert_same(actual, expected, what, tolerance=tolerance, rtol=rtol, atol=atol)


def is_the_same_in_batches(call: Call, provider: str, batched: Sequence[int]) -> None:
    """Check that a row gives bitwise the same result alone and in batches of any size.

    `batched` contains the indices of the tensors whose first dimension is the batch dimension.
    """
    kernel, rows = provider_of(call, provider), len(call.tensors[batched[0]])

    def run(name: str, index: Tensor) -> list[Tensor]:
        tensors = [
            t.index_select(0, index.to(t.device)) if n in batched else t
            for n, t in enumerate(call.tensors)
        ]
        example = call.valid(call.example.with_tensors(tensors))
        if name == provider and not kernel.takes(*call.schema.fill_defaults(*example)):
            raise CannotCheck(f"`supports` of the provider {name!r} returns False")
        with only(call.op, name):
            return probes.tensors_of(call.again(example))

    def alone(name: str) -> list[Tensor]:
        each = [run(name, torch.tensor([row])) for row in range(rows)]
        return [torch.cat(results) for results in zip(*each, strict=True)]

    try:
        whole, by_rows = run(REFERENCE, torch.arange(rows)), alone(REFERENCE)
        probes.assert_same(by_rows, whole, "", rtol=1e-3, atol=1e-3)
    except Exception:
        raise CannotCheck("the reference does not compute results row by row") from None
    expected = alone(provider)
    for count in (2, 3, 4, 7, 16, 33, 64, 129):
        for shift in (0, 1):
            index = (torch.arange(count) + shift) % rows
            right = [result[index.to(result.device)] for result in expected]
            what = f"rows in a batch of {count}, compared with single rows,"
            probes.assert_same(run(provider, index), right, what, rtol=0, atol=0)


def supports_is_sound(call: Call, provider: str, first: Any = None) -> None:
    """Check the `supports` function of a provider.

    This function decides whether the provider's kernel can run a call. It must depend only on its
    arguments, and return False for every call that the kernel rejects. `first` is the result of an
    earlier call of `supports` with these arguments, if any.
    """
    operator, kernel = Operator(call.op, "check"), provider_of(call, provider)

    def ask(example: Any = call.example, is_traced: bool = False) -> bool:
        try:
            return kernel.takes(*operator.schema.fill_defaults(*example), is_traced)
        except ProviderError as error:
            raise AssertionError(str(error)) from error

    def expect(what: str, actual: bool) -> None:
        if actual is not answer:
            raise AssertionError(
                f"{operator}: `supports` of the provider {provider!r} returned {answer} before, "
                f"and {actual} {what}. Let it depend on its arguments only, because answers are "
                "cached."
            )

    seed_all(20010)  # unlikely to be the seed that `supports` sets, so that a new seed shows up
    before = process_state()
    answer = ask()
    for name, value in process_state().items():
        if before[name] != value:
            raise AssertionError(
                f"{operator}: `supports` of the provider {provider!r} changes {name}. Make it a "
                "function without side effects."
            )
    for number in range(2, 6):
        expect(f"in call {number} with the same arguments", ask())
    if first is not None:
        answer = first
        expect("in a later call with the same arguments", ask())
    expect("for zeros of the same shapes", ask(call.example.map(_zeros)))
    with restored():
        for what, change in _SETTINGS.items():
            change()
            expect(what, ask())
    for what, mode, options in (
        ("for fake tensors", fake_tensors.new_fake_mode(), {"static_shapes": True}),
        ("for symbolic sizes", fake_tensors.new_fake_mode(), {}),
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
            f"{operator}: `supports` of the provider {provider!r} returns True, but the kernel "
            f"raises {reason(error)}, unlike the reference. Return False for these arguments."
        ) from error


def _zeros(tensor: Tensor) -> Tensor:
    """Replace a sparse tensor with zeros of the same shape, and return other tensors unchanged.

    torchop removes the data of all tensors except sparse ones before it passes them to a provider's
    `supports` function. So the result of `supports` can depend on the data of sparse tensors only,
    which would be a bug.
    """
    return tensor if probes.is_plain(tensor) else torch.zeros_like(tensor)


_SETTINGS: dict[str, Callable[[], object]] = {
    "with another default dtype": functools.partial(torch.set_default_dtype, torch.float64),
    "with grad enabled": functools.partial(torch.set_grad_enabled, True),
    "with no_grad": functools.partial(torch.set_grad_enabled, False),
}
