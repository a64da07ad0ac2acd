"""Check gradients for layouts, sizes, values and dtypes that the examples do not have."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop import GradientError
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks import indices
from torchop.testing._check.checks.broadcasting import broadcast, requiring_grad_as
from torchop.testing._check.checks.digits import agree_up_to_rounding
from torchop.testing._check.checks.gradients import (
    gradient_case,
    gradients_are_right,
    moved_inputs,
    needs_digits,
    needs_formula,
    slope_problem,
    slopes_are_right,
)
from torchop.testing._check.checks.incoming_gradients import gradients_are_linear
from torchop.testing._check.enlarged import unequal
from torchop.testing._check.layouts import in_layout
from torchop.testing._check.sizes import BLOCKS, each_resized, larger_sizes, sizes, sizes_changed
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import absent, other_scalars
from torchop.testing.process_state import seed_torch

# --------------------------------------------------------------------------------------------------
# Probes


def gradients_are_right_if_broadcast(call: Call, is_double: bool = True) -> None:
    """Check gradients against finite differences, unless backward rejects broadcast arguments.

    A rejection is not a failure, because many kernels accept more shapes than their author
    intended. If the arguments are not in double, check the gradient in a single direction only.
    """
    function, inputs = call.function()
    try:
        probes.gradients(function, inputs)
    except RuntimeError as error:
        # These two errors, of autograd and of torchop, report a gradient of the wrong shape, which
        # is a failure. Any other exception means that the backward formula rejects the call.
        is_of_autograd = "returned an invalid gradient" in str(error)
        if not is_of_autograd and not isinstance(error, GradientError):
            raise CannotCheck(f"backward refuses it: {reason(error)}") from None
        raise
    (gradients_are_right if is_double else slopes_are_right)(call)


def gradients_are_double(call: Call) -> None:
    """Check that the gradients of double arguments are not computed in a narrower dtype."""
    function, _ = call.function()
    seed_torch(0)
    moved = moved_inputs(call, -1e-9)
    total = probes.weighted_sum(function(*moved)) / 3
    for place, grad in enumerate(torch.autograd.grad(total, moved, allow_unused=True)):
        if grad is None or grad.dtype is not torch.double:
            continue
        if (dtype := probes.narrower_dtype(probes.dense(grad))) is not None:
            name = str(dtype).removeprefix("torch.")
            raise AssertionError(
                f"the gradient of {call.differentiable[place]} has dtype {grad.dtype}, but {name} "
                f"can represent each element: {probes.shown(grad)}. The formula computes in {name}."
            )


def gradients_are_numbers(call: Call, what: str) -> None:
    """Check that no gradient is NaN if all results are finite."""
    function, inputs = call.function()
    results = function(*inputs)
    if not all(bool(result.isfinite().all()) for result in results):
        return
    grads = torch.autograd.grad(probes.weighted_sum(results), inputs, allow_unused=True)
    for place, grad in enumerate(grads):
        if grad is not None and bool(probes.dense(grad).isnan().any()):
            name = call.differentiable[place]
            raise AssertionError(
                f"{what}: results are finite, but the gradient of {name} is "
                f"{probes.shown(probes.dense(grad))}. Define the gradient here (for example 0) "
                "with torch.where, and keep both branches free of division by zero. If no caller "
                "may pass such a call, reject it: register_examples(..., valid=...)."
            )


def gradients_agree_with_double(call: Call, dtype: torch.dtype) -> None:
    """Check that gradients in another dtype agree with gradients in double, except for rounding."""

    def outcome(example: Example) -> list[Any]:
        return [*probes.gradients(*probes.as_function(call.op, *example))]

    def cast(to: torch.dtype) -> Example:
        def change(tensor: Tensor) -> Tensor:
            if not tensor.dtype.is_floating_point:
                return tensor
            changed = tensor.detach().to(dtype).to(to)
            return changed.requires_grad_(tensor.requires_grad)

        return call.changed(change)

    example = cast(dtype)
    try:
        actual = outcome(example)
    except Exception as error:
        raise CannotCheck(f"backward refuses {dtype}: {reason(error)}") from None
    names = [f"the gradient of {name}" for name in call.differentiable]
    agree_up_to_rounding(Call(call.op, *example), actual, outcome, names)


def gradients_ignore_layouts(call: Call, what: str) -> None:
    """Check that gradients are the same as for contiguous arguments."""
    function, inputs = call.function()
    plain = Example(*probes.contiguous_copies(tuple(call.example)))
    expected = probes.gradients(
        *probes.as_function(call.op, *requiring_grad_as(plain, call.example))
    )
    limits: dict[str, Any] = {**probes.rounding(torch.float32, expected)}
    actual = probes.gradients(function, inputs)
    probes.assert_same(actual, expected, f"gradients, {what}", **limits)


def last_slopes_are_right(call: Call) -> None:
    """Check the gradient of the last elements of each tensor against finite differences.

    Kernels with a fixed block size often forget these elements.
    """
    slopes_are_right(call, 1e-6, 1e-3)
    function, inputs = call.function()

    def of_last(*ends: Tensor) -> Any:
        joined = (
            torch.cat([tensor.detach().flatten()[: -len(end)], end]).view(tensor.shape)
            for tensor, end in zip(inputs, ends, strict=True)
        )
        return function(*joined)

    ends = [tensor.detach().flatten()[-7:] for tensor in inputs]

    def moved_ends(place: int) -> list[Tensor]:
        # The function may have kinks at equal elements, like a maximum. So move each element by a
        # different distance.
        return [
            (end + 0.01 * place * torch.linspace(1, 2, len(end)).to(end)).requires_grad_()
            for end in ends
        ]

    problem = slope_problem(of_last, moved_ends)
    if problem is not None:
        raise problem


# --------------------------------------------------------------------------------------------------
# Cases


def gradcheck(subject: Subject, details: Details) -> Iterator[Case]:
    """Do gradients agree with finite differences, also for broadcast and empty tensors?"""
    needs_formula(subject)
    if not subject.takes_double:
        details["precision"] = "float32, because the operator does not support double"
        for example in subject.trainable_examples[:3]:
            yield gradient_case("the example in float32", example, probe=slopes_are_right)
        yield _of_ones(subject.trainable_examples[0])
        for example in subject.trainable_examples[:3]:
            for label, smaller in broadcast(subject, example):
                options = {"is_double": False}
                yield gradient_case(
                    label, smaller, probe=gradients_are_right_if_broadcast, options=options
                )
        return
    needs_digits(subject)
    examples = subject.double_examples[:3]
    for example in examples:
        yield gradient_case("the example in double", example, probe=gradients_are_right)
    yield _of_ones(examples[0])
    for example in examples:
        for label, smaller in broadcast(subject, example):
            yield gradient_case(label, smaller, probe=gradients_are_right_if_broadcast)
        yield from _of_other_sizes(subject, example)
        for case in (
            *_unequal(subject, example),
            *other_scalars(subject, example),
            *absent(subject, example),
        ):
            if any(tensor.requires_grad for tensor in case.example.tensors):
                yield gradient_case(case.label, case.example, probe=gradients_are_right)
        yield from _in_other_layouts(subject, example)
        yield from _of_other_values(subject, example)
    yield gradient_case("digits in double", examples[0], probe=gradients_are_double)
    if not subject.is_random:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            label, probe = f"in {dtype} and in double", gradients_agree_with_double
            yield gradient_case(label, examples[0], probe=probe, options={"dtype": dtype})


def _of_ones(example: Example) -> Case:
    return gradient_case("incoming gradients of 1", example, probe=gradients_are_linear)


def _of_other_sizes(subject: Subject, example: Example) -> Iterator[Case]:
    # Scatter indices must be distinct, so several of them cannot index a dimension of size 1.
    smaller = (0,) if any(map(probes.has_integers, example.tensors)) else (0, 1)
    changes = [{size: new} for size in sizes(example) for new in smaller if size > new]
    for change, other in each_resized(example, *changes):
        changed = requiring_grad_as(other, example)
        yield gradient_case(sizes_changed(change), changed, probe=gradients_are_right)
    # C++ kernels may read out of bounds if the sizes of their arguments do not match, so enlarge
    # sizes only for Python kernels, or for calls with a single tensor.
    if subject.operator.function is None and len(example.tensors) > 1:
        return
    results = probes.tensors_of(Call(subject.op, *example.map(Tensor.detach)).again())
    for change, other in each_resized(example, *larger_sizes(example, results, BLOCKS[:1])):
        changed = requiring_grad_as(other, example)
        if subject.refusal(changed) is None and subject.has_fake_sizes(changed):
            label = sizes_changed(change)
            yield gradient_case(label, changed, probe=last_slopes_are_right, shrink=False)


def _in_other_layouts(subject: Subject, example: Example) -> Iterator[Case]:
    for label, layout, places in (
        ("transposed tensors", "transposed", range(len(example.tensors))),
        ("integers all the same", "expanded", indices.that_may_repeat(example)),
    ):
        arrange = functools.partial(_laid_out, layout, places)
        yield gradient_case(label, example, arrange, probe=gradients_are_right)
    if subject.is_random:
        return
    places = [place for place, tensor in enumerate(example.tensors) if tensor.requires_grad]
    for layout in ("sliced", "expanded", "channels_last", "negative"):
        arrange = functools.partial(_laid_out, layout, places)
        options = {"what": f"{layout} tensors"}
        yield gradient_case(
            f"{layout} tensors", example, arrange, probe=gradients_ignore_layouts, options=options
        )


def _of_other_values(subject: Subject, example: Example) -> Iterator[Case]:
    names, tensors = subject.names(example), example.tensors
    places = [p for p, t in enumerate(tensors) if t.requires_grad and t.layout is torch.strided]

    def numbers(what: str, place: int, value: Tensor) -> Case:
        changed = requiring_grad_as(example.replace(place, value.detach().clone()), example)
        return gradient_case(what, changed, probe=gradients_are_numbers, options={"what": what})

    for place, tensor in enumerate(tensors):
        if indices.gathers(subject, example, place):
            label = f"{names[place]} all the same"
            yield gradient_case(
                label, indices.with_equal(example, place), probe=gradients_are_right
            )
        if place in places:
            yield numbers(f"{names[place]} full of zeros", place, torch.zeros_like(tensor))
            if not tensor.is_complex():
                large = 1000 * probes.signs_like(tensor).to(tensor.dtype)
                yield numbers(f"{names[place]} full of 1000 and -1000", place, large)
    for one, other in itertools.combinations(places, 2):
        if tensors[one].shape == tensors[other].shape:
            what = f"{names[other]} equal to {names[one]}"
            yield numbers(what, other, tensors[one])


def _unequal(subject: Subject, example: Example) -> Iterator[Case]:
    """Yield calls with non-square matrices that both the kernel and the fake kernel accept."""
    with contextlib.suppress(CannotCheck):
        for case in unequal(subject, example.map(torch.Tensor.detach)):
            changed = requiring_grad_as(case.example, example)
            if subject.refusal(changed) is None and subject.has_fake_sizes(changed):
                yield dataclasses.replace(case, example=changed)


def _laid_out(layout: str, places: Sequence[int], example: Example) -> Example:
    return requiring_grad_as(in_layout(layout, places)(example.map(torch.Tensor.detach)), example)
