"""Checks of the precision of results, and of the default values of float arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._inspect.registrant import functions_of
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.results import succeeds
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS, may_be_places
from torchop.testing.process_state import seed_torch


def _in_double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.dtype.is_floating_point else tensor.clone()


@contextlib.contextmanager
def _needs_double() -> Iterator[None]:
    """Skip the case, by raising NotImplementedError, if the operator rejects double tensors."""
    try:
        yield
    except CannotCheck:
        raise
    except Exception as error:
        raise NotImplementedError(f"no double kernel: {reason(error)}") from error


def agrees_with_double(call: Call, rtol: float | None = None, atol: float | None = None) -> None:
    """Check that the result agrees with the result in double, except for rounding errors."""
    succeeds(call)
    outcome = functools.partial(probes.outcome, call.op)
    actual = probes.mapped(call.record.outcome, probes.dense)
    names = [f"result {index}" for index in range(len(actual))]
    agree_up_to_rounding(call, actual, lambda example: outcome(*example), names, rtol, atol)


def agree_up_to_rounding(
    call: Call,
    actual: Sequence[Any],
    outcome: Callable[[Example], Any],
    names: Sequence[str],
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Check that `actual` agrees with the outcome of the call with its arguments in double.

    If no tolerances are given, estimate them: change each input by about one unit in the last place
    of its dtype, and allow an error in proportion to the resulting change in double.
    """

    def moved(share: float) -> Any:
        """Return the outcome in double after moving inputs by `share` units in the last place."""

        def change(tensor: Tensor) -> Tensor:
            if not tensor.dtype.is_floating_point:
                return tensor.clone()
            unit = share * torch.finfo(tensor.dtype).eps
            changed = tensor.detach().double() * (1 + unit * probes.signs_like(tensor))
            return changed.requires_grad_(tensor.requires_grad)

        return probes.mapped(outcome(call.changed(change)), probes.dense)

    with _needs_double():
        expected = moved(0.0)
    nearby = []
    for share in (1.0, -1.0, 0.5):
        with contextlib.suppress(CannotCheck):
            nearby.append(moved(share))
    shapes = [[t.shape for t in probes.tensors_of(each)] for each in (actual, expected, *nearby)]
    if any(each != shapes[0] for each in shapes):
        # The sizes of results depend on the values, for example because the operator removes
        # duplicates, so there are no corresponding elements to compare.
        raise CannotCheck("the sizes of results depend on rounding")
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(one, torch.Tensor) or not one.dtype.is_floating_point:
            continue
        limits = torch.finfo(one.dtype)
        one, other = one.double(), other.double()
        fits = other.abs() <= limits.max / 2
        if not fits.any():
            continue
        changes = [(each[index].double() - other)[fits].abs() for each in nearby]
        one, other = one[fits], other[fits]
        is_scaled = False
        if rtol is None and atol is None:
            change = torch.stack([torch.zeros_like(other), *changes]).amax(0).nan_to_num(0.0)
            bound = 64 * (limits.eps * max(1.0, float(other.abs().max())) + change)
            is_scaled = limits.bits == 16 and _is_scaled(one, other, change, limits.eps)
        else:
            bound = (atol or 0.0) + (rtol or 0.0) * other.abs()
        if is_scaled or not bool(((one - other).abs() <= bound).all()):
            raise AssertionError(
                f"{names[index]} in {actual[index].dtype} is {probes.shown(one)}, but "
                f"{probes.shown(other)} for the same numbers in double."
            )


def _is_scaled(actual: Tensor, expected: Tensor, change: Tensor, eps: float) -> bool:
    """Return whether all of `actual` is larger or smaller than `expected` by the same factor.

    Rounding errors of 16-bit dtypes are large, but their signs vary, so they hardly affect the
    least-squares factor between the two.
    """
    square = float(expected.square().sum())
    if not square or not bool(actual.isfinite().all()):
        return False
    factor = float((actual * expected).sum()) / square
    return abs(factor - 1) > 4 * (eps + math.sqrt(float(change.square().sum()) / square))


def computes_in_double(call: Call) -> None:
    """Check that the kernel does not compute double results in a narrower dtype."""
    succeeds(call)
    for index, result in enumerate(call.record.outcome):
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.double:
            continue
        result = probes.dense(result)
        if (dtype := probes.narrower_dtype(result)) is not None:
            name = str(dtype).removeprefix("torch.")
            raise AssertionError(
                f"result {index} has dtype float64, but {name} can represent each element: "
                f"{probes.shown(result)}. The kernel computes in {name}."
            )


def keeps_digits_of_half(call: Call) -> None:
    """Check that float16 results are not computed in bfloat16, which has fewer digits."""
    succeeds(call)
    with _needs_double():
        in_double = call.again(call.changed(_in_double))
    tensors = (probes.tensors_of(outcome) for outcome in (call.record.outcome, in_double))
    for index, (one, other) in enumerate(zip(*tensors, strict=True)):
        if one.dtype is not torch.float16 or one.shape != other.shape:
            continue
        half = probes.dense(other).half()
        shows = half.isfinite() & (half.bfloat16() != half)
        right, got = half[shows], probes.dense(one)[shows]
        if len(right) > 2 and torch.equal(got.bfloat16().half(), got):
            raise AssertionError(
                f"result {index} has dtype float16, but bfloat16 can represent each element: it is "
                f"{probes.shown(got)}, and should be {probes.shown(right)}. The kernel computes in "
                "bfloat16."
            )


def keeps_float_arguments(call: Call, name: str) -> None:
    """Check that the kernel reads a float argument as a double, not as float32.

    If a relative change of the argument by 2**-20 affects every element of a result, a change by
    2**-32 must affect the result, too. If the kernel reads the argument as float32, it rounds the
    smaller change away.
    """
    value = call.kwargs[name]

    def results(share: float) -> list[Tensor]:
        changed = call.valid(call.example.with_argument(name, value * (1 + share)))
        return [t for t in probes.tensors_of(call.again(changed)) if t.dtype is torch.double]

    one_and_others = zip(*(results(share) for share in (0.0, 2.0**-32, 2.0**-20)), strict=True)
    for one, small, large in one_and_others:
        if one.shape != large.shape or not torch.equal(one, small):
            continue
        if bool(((large - one).abs() > 2.0**-24 * one.abs()).all()) and one.numel():
            raise AssertionError(
                f"{name}={value!r} and {value * (1 + 2.0**-32)!r} give the same results in "
                "float64. The kernel keeps 24 of the 53 bits of a float argument; use double."
            )


# Multiples of 2**32 to add to integers. Converting int64 to int32 in a kernel drops them.
_UPPER = (2**40, 3 * 2**41, -(2**42))


def computes_in_int64(call: Call, place: int) -> None:
    """Check that the results depend on the upper 32 bits of integers.

    If a kernel converts the integers to int32, clearing these bits does not change its results, and
    the results fit into int32. Some operators, such as `x % 8`, depend only on the lower bits by
    design. Their results are small, so the check ignores results of up to 2**24.
    """
    tensor = call.tensors[place]
    steps = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
    # Use large odd numbers below 2**31, so that even the lower bits alone give large results.
    lower = 2**30 + 2**27 * (steps % 7) + 2 * steps + 1
    upper = torch.tensor(_UPPER, device=tensor.device)[steps % len(_UPPER)]
    low, high = (call.valid(call.example.replace(place, each)) for each in (lower, lower + upper))
    seed_torch(0)
    try:
        pairs = zip(call.again(high), call.again(low), strict=True)
    except Exception as error:
        raise CannotCheck(f"large integers are refused: {reason(error)}") from None
    for index, (one, other) in enumerate(pairs):
        if not isinstance(one, Tensor) or one.dtype is not torch.int64 or not one.numel():
            continue
        is_large = 2**24 < int(one.abs().max()) < 2**31
        if is_large and torch.equal(one, other):
            name = call.names[place]
            raise AssertionError(
                f"result {index} has dtype int64, but is the same without the upper 32 bits of "
                f"{name}: it is {probes.shown(one)} for {probes.shown(lower + upper)}. The kernel "
                "computes in int32."
            )


def int64(subject: Subject, details: Details) -> Iterator[Case]:
    """Are int64 results not computed in int32?"""
    subject.needs_fixed_results()
    for example in subject.accepted():
        for place, tensor in enumerate(example.tensors):
            if not probes.has_integers(tensor) or tensor.dtype is not torch.int64:
                continue
            # Do not replace integers that may be indices into another tensor, or counts. C++
            # kernels often do not validate indices, and a loop that runs that many times would not
            # end.
            is_alone = subject.operator.function is not None and len(example.tensors) == 1
            if may_be_places(tensor, example) and not is_alone:
                continue
            label = f"{subject.names(example)[place]} with large integers"
            options = {"place": place}
            yield Case(label, example, None, "value", computes_in_int64, options, shrink=False)
    raise CannotCheck("no argument holds integers of dtype int64 that cannot be indices")


def ignores_dtype_of_indices(call: Call, dtype: torch.dtype) -> None:
    """Check that results are the same if all indices are converted to `dtype`."""

    def change(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.dtype in (torch.int32, torch.int64) else tensor

    expected = call.again()
    try:
        actual = call.again(call.changed(change))
    except Exception as error:
        raise CannotCheck(f"indices in {dtype} are refused: {reason(error)}") from None
    pairs = zip(call.names, call.tensors, strict=True)
    names = " and ".join(name for name, t in pairs if t.dtype in (torch.int32, torch.int64))
    probes.assert_same(actual, expected, f"with {names} in {dtype}", dtypes=False)


def indices(subject: Subject, details: Details) -> Iterator[Case]:
    """Are results the same for indices in int32 and in int64?"""
    subject.needs_fixed_results()
    for example in subject.accepted():
        integers = [t for t in example.tensors if t.dtype in (torch.int32, torch.int64)]
        is_float = any(t.dtype.is_floating_point for t in example.tensors)
        # Integers that are not indices may overflow in int32 arithmetic, so check only probable
        # indices.
        if is_float and integers and all(may_be_places(each, example) for each in integers):
            other = torch.int32 if integers[0].dtype is torch.int64 else torch.int64
            label, options = f"indices in {other}", {"dtype": other}
            yield Case(label, example, None, "dtype", ignores_dtype_of_indices, options)
    raise CannotCheck("no argument holds indices")


def float_arguments(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the kernel read float arguments as doubles?"""
    subject.needs_fixed_results()
    for case in subject.cases(VARIANTS["digits"]):
        named = subject.by_name(case.example)
        for name, value in named.kwargs.items():
            if type(value) is float and math.isfinite(value) and value:
                options = {"name": name}
                label = f"{name} in double"
                yield Case(label, named, probe=keeps_float_arguments, options=options)


def uses_its_default(call: Call, name: str) -> None:
    """Check that the default of an argument is the same in the kernel and in the schema.

    If a caller passes the default from the schema, the dispatcher drops the argument, so the kernel
    uses its own default. To compare the two, call the operator without the argument, and with a
    number very close to the default in the schema.
    """
    near = call.example.kwargs[name]
    kwargs = {k: v for k, v in call.kwargs.items() if k != name}
    without = call.valid(Example(call.args, kwargs))
    expected = call.again()
    limits: dict[str, Any] = {**probes.rounding(torch.float32, expected)}
    default = next(a.default for a in call.schema.arguments if a.name == name)
    try:
        probes.assert_same(call.again(without), expected, "", **limits)
    except AssertionError as error:
        raise AssertionError(
            f"{name}: the default in the schema is {default!r}, but a call without {name} differs "
            f"from a call with {near!r}. Give the kernel the same default. {error}"
        ) from None


def declares_its_default(call: Call, name: str, default: Any, of_kernel: Any) -> None:
    """Report that an argument of a Python kernel has a different default from the schema."""
    raise AssertionError(
        f"{name}: the default is {default!r} in the schema, and {of_kernel!r} in the kernel. The "
        "dispatcher drops arguments that are equal to the default in the schema, so the kernel "
        "uses its own default. Give both the same default."
    )


def _different_defaults(subject: Subject) -> Iterator[dict[str, Any]]:
    """Yield the arguments whose defaults differ between the schema and a Python kernel."""
    for function in functions_of(subject.operator.name):
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # it has no signature
            continue
        for argument in subject.schema.arguments:
            default = argument.default
            parameter = parameters.get(argument.name)
            if parameter is None or type(default) not in (bool, int, float, str):
                continue
            of_kernel = parameter.default
            if type(of_kernel) is type(default) and of_kernel != default:
                yield {"name": argument.name, "default": default, "of_kernel": of_kernel}


def defaults(subject: Subject, details: Details) -> Iterator[Case]:
    """Does the kernel have the same defaults as the schema?"""
    for options in _different_defaults(subject):
        label, example = f"without {options['name']}", subject.accepted(most=1)[0]
        yield Case(label, example, None, "scalar", declares_its_default, options, shrink=False)
    subject.needs_fixed_results()
    for example in subject.accepted():
        named = subject.by_name(example)
        for argument in subject.schema.arguments:
            default = argument.default
            if type(default) is float and math.isfinite(default):
                near = math.nextafter(default, math.inf) if default else 1e-30
                changed = named.with_argument(argument.name, near)
                label, options = f"without {argument.name}", {"name": argument.name}
                yield Case(label, changed, None, "scalar", uses_its_default, options)
    raise CannotCheck("no argument has a float as default")
