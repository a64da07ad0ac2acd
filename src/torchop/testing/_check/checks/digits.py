"""Probes of digits, and of the defaults of numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.results import succeeds
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS


def agrees_with_double(call: Call, rtol: float | None = None, atol: float | None = None) -> None:
    """The result is that of the same numbers in double, up to the precision of the dtype.

    Without tolerances, the bound follows from the change of the results in double if the inputs
    change by one unit of that precision: a function that magnifies them may lose as many digits.
    """

    def in_double(moved: float = 0.0) -> Any:
        """Return the outcome in double, with inputs that differ by this share of themselves."""
        moved_call = call.example.map(
            lambda t: (
                t.double() * (1 + moved * torch.finfo(t.dtype).eps * probes.signs_like(t))
                if t.dtype.is_floating_point
                else t.clone()
            )
        )
        return probes.mapped(probes.outcome(call.op, *moved_call), probes.dense)

    succeeds(call)
    actual = probes.mapped(call.record.outcome, probes.dense)
    try:
        expected = in_double()
    except Exception as error:
        raise NotImplementedError(f"no double kernel: {reason(error)}") from error
    beside = [in_double(moved) for moved in (1.0, -1.0, 0.5)]
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(one, torch.Tensor) or not one.dtype.is_floating_point:
            continue
        limits = torch.finfo(one.dtype)
        fits = other.abs() <= limits.max / 2
        if not fits.any():
            continue
        changes = [(each[index] - other)[fits].abs() for each in beside]
        one, other = one.double()[fits], other.double()[fits]
        if rtol is None and atol is None:
            change = torch.stack(changes).amax(0).nan_to_num(0.0)
            bound = 64 * (limits.eps * max(1.0, float(other.abs().max())) + change)
        else:
            bound = (atol or 0.0) + (rtol or 0.0) * other.abs()
        if not bool(((one - other).abs() <= bound).all()):
            raise AssertionError(
                f"result {index} in {actual[index].dtype} is {probes.shown(one)}, and "
                f"{probes.shown(other)} for the same numbers in double."
            )


def computes_in_double(call: Call) -> None:
    """Results in double have more digits than float32 could hold."""
    succeeds(call)
    for index, result in enumerate(call.record.outcome):
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.double:
            continue
        result = probes.dense(result)
        if probes.has_digits_of_float32(result):
            raise AssertionError(
                f"result {index} is of dtype float64, but each element is a float32: "
                f"{probes.shown(result)}. The kernel computes in float32."
            )


def keeps_digits_of_half(call: Call) -> None:
    """Results in float16 have more digits than bfloat16 could hold, as those in double have."""
    succeeds(call)
    doubles = call.example.map(lambda t: t.double() if t.is_floating_point() else t)
    pairs = zip(
        probes.tensors_of(call.record.outcome),
        probes.tensors_of(call.again(doubles)),
        strict=True,
    )
    for index, (one, other) in enumerate(pairs):
        if one.dtype is not torch.float16 or one.shape != other.shape:
            continue
        half = probes.dense(other).half()
        shows = half.isfinite() & (half.bfloat16() != half)
        right, got = half[shows], probes.dense(one)[shows]
        if len(right) > 2 and torch.equal(got.bfloat16().half(), got):
            raise AssertionError(
                f"result {index} is of dtype float16, but each element is a bfloat16: "
                f"{probes.shown(got)}, where it is {probes.shown(right)} in float16. The kernel "
                "computes in bfloat16."
            )


def keeps_float_arguments(call: Call, name: str) -> None:
    """A float argument counts with more digits than float32 could hold.

    Only where a change that float32 would show matters so much that a smaller one must, too.
    """
    value = call.kwargs[name]

    def results(share: float) -> list[Tensor]:
        changed = call.example.with_argument(name, value * (1 + share))
        return [t for t in probes.tensors_of(call.again(changed)) if t.dtype is torch.double]

    one_and_others = zip(*(results(share) for share in (0.0, 2.0**-32, 2.0**-20)), strict=True)
    for one, small, large in one_and_others:
        if one.shape != large.shape or not torch.equal(one, small):
            continue
        if bool(((large - one).abs() > 2.0**-24 * one.abs()).all()) and one.numel():
            raise AssertionError(
                f"{name}={value!r} and {value * (1 + 2.0**-32)!r} give the same results in "
                "float64. The kernel keeps 24 of the 53 bits of a float argument; take double."
            )


def float_arguments(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a float argument keep the digits of double?"""
    subject.needs_fixed_results()
    for case in subject.cases(VARIANTS["digits"]):
        named = subject.by_name(case.example)
        for name, value in named.kwargs.items():
            if type(value) is float and math.isfinite(value) and value:
                options = {"name": name}
                label = f"{name} in double"
                yield Case(label, named, probe=keeps_float_arguments, options=options)


def uses_its_default(call: Call, name: str) -> None:
    """A call without an argument does the same as one with nearly the default of the schema.

    The dispatcher leaves a value out that equals the default, and the kernel takes its own.
    """
    near = call.example.kwargs[name]
    without = Example(call.args, {k: v for k, v in call.kwargs.items() if k != name})
    expected = call.again()
    limits: dict[str, Any] = {**probes.rounding(torch.float32, expected)}
    default = next(a.default for a in call.schema.arguments if a.name == name)
    try:
        probes.assert_same(call.again(without), expected, "", **limits)
    except AssertionError as error:
        raise AssertionError(
            f"{name}: the schema says that the default is {default!r}, and a call without it does "
            f"not do what a call with {near!r} does. The default of the kernel must be the same. "
            f"{error}"
        ) from None


def defaults(subject: Subject, details: Details) -> Iterator[Case]:
    """Are the defaults of the kernel those of the schema?"""
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
