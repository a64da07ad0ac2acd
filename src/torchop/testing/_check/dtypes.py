"""Checks of dtypes: which an operator accepts, and whether it is the same operator in each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.compilable import with_fake_kernel, with_programs
from torchop.testing._check.integers import by_name
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.memory import raises_nothing
from torchop.testing._check.subject import (
    CannotCheck,
    Case,
    Example,
    Excluded,
    Subject,
    reason,
)
from torchop.testing._check.variants import each_resized, sizes
from torchop.testing._opcheck import opcheck

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
EVERY = (*FLOATS, torch.complex64, torch.complex128, *INTEGERS)

# --------------------------------------------------------------------------------------------------
# Probes


def agrees_with_double(
    op: Any, args: Any, kwargs: Any, rtol: float | None = None, atol: float | None = None
) -> None:
    """The result is that of the same numbers in double, up to the precision of the dtype.

    Without tolerances, the bound is made of what the results in double change by if the inputs do
    by one unit of that precision: a function that magnifies them may lose as many digits.
    """

    def in_double(moved: float = 0.0) -> Any:
        """The outcome in double, with inputs that differ by this share of themselves."""
        call = probes.mapped(
            (args, kwargs),
            lambda t: (
                t.double() * (1 + moved * torch.finfo(t.dtype).eps * probes.signs_like(t))
                if t.dtype.is_floating_point
                else t.clone()
            ),
        )
        return probes.mapped(probes.outcome(op, *call), probes.dense)

    actual = probes.mapped(probes.outcome_of_copies(op, args, kwargs), probes.dense)
    expected = in_double()
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
                f"result {index} in {actual[index].dtype} is {one.flatten()[:6].tolist()}, and "
                f"{other.flatten()[:6].tolist()} for the same numbers in double."
            )


def computes_in_double(op: Any, args: Any, kwargs: Any) -> None:
    """Results in double have more digits than float32 could hold."""
    for index, result in enumerate(probes.outcome(op, args, kwargs)):
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.double:
            continue
        result = probes.dense(result)
        if probes.has_digits_of_float32(result):
            raise AssertionError(
                f"result {index} is of dtype float64, but each element is a float32: "
                f"{result.flatten()[:3].tolist()}. The kernel computes in float32."
            )


def keeps_digits_of_half(op: Any, args: Any, kwargs: Any) -> None:
    """Results in float16 have more digits than bfloat16 could hold, as those in double have."""
    in_double = probes.mapped((args, kwargs), lambda t: t.double() if t.is_floating_point() else t)
    expected = probes.tensors_of(probes.outcome_of_copies(op, *in_double))
    actual = probes.tensors_of(probes.outcome_of_copies(op, args, kwargs))
    for index, (one, other) in enumerate(zip(actual, expected, strict=True)):
        if one.dtype is not torch.float16 or one.shape != other.shape:
            continue
        half = probes.dense(other).half()
        told = half[half.isfinite() & (half.bfloat16() != half)]
        got = probes.dense(one)[half.isfinite() & (half.bfloat16() != half)]
        if len(told) > 2 and torch.equal(got.bfloat16().half(), got):
            raise AssertionError(
                f"result {index} is of dtype float16, but each element is a bfloat16: "
                f"{probes.shown(got)}, where it is {probes.shown(told)} in float16. The kernel "
                "computes in bfloat16."
            )


def keeps_float_arguments(op: Any, args: Any, kwargs: Any, name: str) -> None:
    """A float argument counts with more digits than float32 could hold.

    Only where a change that float32 would show matters so much that a smaller one must, too.
    """

    def results(share: float) -> list[Tensor]:
        changed = {**kwargs, name: kwargs[name] * (1 + share)}
        tensors = probes.tensors_of(probes.outcome_of_copies(op, args, changed))
        return [tensor for tensor in tensors if tensor.dtype is torch.double]

    plain, near, far = (results(share) for share in (0.0, 2.0**-32, 2.0**-20))
    for one, small, large in zip(plain, near, far, strict=True):
        if one.shape != large.shape or not torch.equal(one, small):
            continue
        if bool(((large - one).abs() > 2.0**-24 * one.abs()).all()) and one.numel():
            raise AssertionError(
                f"{name}={kwargs[name]!r} and {kwargs[name] * (1 + 2.0**-32)!r} give the same "
                "results in float64. The kernel keeps 24 of the 53 bits of a float argument; take "
                "double."
            )


def refused_when_compiled(op: Any, args: Any, kwargs: Any) -> None:
    """A compiled program (aot_eager) refuses what eager mode refuses."""
    torch.compiler.reset()
    try:
        compiled = torch.compile(lambda a, k: op(*a, **k), backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            compiled(args, kwargs)
    except Exception:
        return
    finally:
        torch.compiler.reset()
    raise AssertionError("eager mode refuses this call, and a compiled program returns from it.")


# --------------------------------------------------------------------------------------------------
# Cases


def in_dtype(dtype: torch.dtype, example: Example) -> Example:
    """The example with its floating-point and complex tensors in another dtype."""

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point and not tensor.dtype.is_complex:
            return tensor
        is_integer = not dtype.is_floating_point and not dtype.is_complex
        if is_integer and tensor.layout is torch.strided:  # sparse tensors have fewer functions
            tensor = tensor.real if tensor.dtype.is_complex else tensor
            return (tensor.nan_to_num(0) * 3).round().clamp(0, 100).to(dtype)
        if tensor.dtype.is_complex and not dtype.is_complex:
            return tensor.real.to(dtype)
        return tensor.to(dtype)

    return example.map(change)


def _variable(subject: Subject) -> list[Example]:
    """The examples with a floating-point tensor."""
    examples = [e for e in subject.accepted() if any(_is_float(t) for t in e.tensors)]
    if not examples:
        raise CannotCheck("no argument is of a floating-point or complex dtype")
    return examples


def _is_float(tensor: Tensor) -> bool:
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def _faked(label: str, example: Example) -> Case:
    """The case that the fake kernel describes the results."""
    return Case(label, opcheck, example, options={"test_utils": "test_faketensor"})


def accepted(subject: Subject, details: Details) -> Iterator[Case]:
    """Which dtypes are accepted, and does the fake kernel say the same of their results?"""
    try:
        subject = with_fake_kernel(subject, details)
    except CannotCheck as why:
        details["fake kernel"] = str(why)
    table: dict[str, str] = details.setdefault("dtypes", {})
    for example in _variable(subject)[:1]:
        for dtype in EVERY:
            changed = in_dtype(dtype, example)
            name = str(dtype).removeprefix("torch.")
            error = subject.refusal(changed)
            if error is not None:
                is_excluded = isinstance(error, Excluded)
                refused = "excluded" if is_excluded else f"refused ({type(error).__name__})"
                table[name] = refused
                continue
            with torch.no_grad():
                results = probes.outcome(subject.op, *changed.copy())
            dtypes = [str(t.dtype).removeprefix("torch.") for t in probes.tensors_of(results)]
            table[name] = f"-> {', '.join(dtypes)}" if dtypes else "accepted"
            if "fake kernel" not in details:
                yield _faked(f"in {name}", changed)
                none = dict.fromkeys(sizes(changed), 0) if dtype is torch.double else {}
                for _, empty in each_resized(changed, none, subject=subject) if none else ():
                    yield _faked(f"in {name}, with 0 elements", empty)
            else:
                yield Case(f"in {name}", raises_nothing, changed)


def promotion(subject: Subject, details: Details) -> Iterator[Case]:
    """Is promotion the same for the fake kernel and the real one?"""
    subject = with_fake_kernel(subject, details)
    for example in _variable(subject)[:1]:
        places = [p for p, t in enumerate(example.tensors) if t.dtype.is_floating_point]
        for place in places if len(places) > 1 else []:
            for dtype in (torch.float64, torch.bfloat16):
                changed = example.replace(place, example.tensors[place].to(dtype))
                yield _faked(f"{subject.names(example)[place]} in {dtype}", changed)
    raise CannotCheck("no call has two floating-point tensors")


def numbers(subject: Subject, details: Details) -> Iterator[Case]:
    """Are results the same numbers in every dtype?"""
    subject.needs_fixed_results()
    for example in _variable(subject):
        if any(t.dtype.is_complex for t in example.tensors):
            continue
        error = subject.refusal(in_dtype(torch.double, example))
        if error is not None:
            raise CannotCheck(f"no double kernel: {reason(error)}")
        for dtype in FLOATS:
            if dtype is not torch.double:
                changed = in_dtype(dtype, example)
                label = f"in {dtype} and in double"
                yield Case(label, agrees_with_double, changed, options=subject.tolerances)
        halves = _with_digits(example, torch.float16, 2.0**-8, subject.seed)
        yield Case("digits in torch.float16", keeps_digits_of_half, halves, shrink=False)


def double(subject: Subject, details: Details) -> Iterator[Case]:
    """Are double results computed in double?"""
    for example in _variable(subject):
        if any(t.dtype.is_complex for t in example.tensors):
            continue
        doubled = _with_digits(example, torch.double, 1e-9, subject.seed)
        yield Case("in double", computes_in_double, doubled, shrink=False)
        named = by_name(subject, doubled)
        for name, value in named.kwargs.items() if not subject.is_random else ():
            if type(value) is float and math.isfinite(value) and value:
                options = {"name": name}
                yield Case(f"{name} in double", keeps_float_arguments, named, options=options)


def _with_digits(example: Example, dtype: torch.dtype, share: float, seed: int) -> Example:
    """The example in a dtype, with numbers that are up to this share of themselves larger."""
    generator = torch.Generator().manual_seed(seed)

    def change(tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor
        noise = torch.rand(tensor.shape, generator=generator, dtype=torch.double)
        return (tensor.double() * (1 + share * noise.to(tensor.device))).to(dtype)

    return example.map(change)


def refused(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a compiled program refuse what eager mode refuses?

    It is asked about the first dtype that the kernel refuses.
    """
    subject = with_programs(subject, details)
    for example in _variable(subject)[:1]:
        for dtype in EVERY:
            changed = in_dtype(dtype, example)
            if subject.refusal(changed) is not None:
                label = f"in {dtype}, which eager mode refuses"
                yield Case(label, refused_when_compiled, changed, calls=False)
                return
    raise CannotCheck("it refuses no dtype")


CHECKS = (
    *family("dtypes", accepted, promotion, numbers, double),
    *family("dtypes", refused, is_costly=True),
)
