"""Check the backward pass for incoming gradients in any layout, and inputs without grad."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.gradients import (
    gradient_case,
    moved_inputs,
    needs_digits,
    needs_finite_results,
    needs_formula,
    slope_problem,
    with_formula,
)
from torchop.testing._check.layouts import GUARD, contiguous, contiguous_strides, sliced, transposed
from torchop.testing._check.subject import Subject
from torchop.testing.process_state import seed_torch


def incoming_gradient(result: Tensor) -> Tensor:
    """Return an incoming gradient for a result, in which all elements have different values."""
    values = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.double, device=result.device)
    return values.reshape(result.shape).to(result.dtype)


def second_derivatives_of_each_are_the_same(call: Call) -> None:
    """Check that second derivatives stay the same if some of the tensors do not require grad."""
    function, inputs = call.function()
    every = range(len(inputs))

    def second(wanted: Sequence[int], required: Sequence[int], of_gradients: bool) -> list[Any]:
        tensors = [t.detach().requires_grad_(n in required) for n, t in enumerate(inputs)]
        chosen = [tensors[place] for place in wanted]
        results = [result for result in function(*tensors) if result.requires_grad]
        if not results:
            return [None for _ in chosen]
        given = [incoming_gradient(result).requires_grad_(of_gradients) for result in results]
        first = torch.autograd.grad(results, chosen, given, create_graph=True, allow_unused=True)
        recorded = [grad for grad in first if grad is not None and grad.requires_grad]
        if not recorded:
            return [None for _ in chosen]
        total = probes.weighted_sum(recorded)
        return [*torch.autograd.grad(total, chosen, allow_unused=True)]

    def compare(what: str, wanted: Sequence[int], required: Sequence[int], frozen: bool) -> None:
        what = f"second derivatives if {what} requires no grad"
        expected = second(wanted, every, True)
        try:
            actual = second(wanted, required, not frozen)
        except Exception as error:
            text = f"{what}: backward raised {type(error).__name__}: {error}"
            raise AssertionError(text) from error
        probes.assert_same(actual, expected, what)

    alone = [(place,) for place in every]
    others = [tuple(n for n in every if n != place) for place in every]
    for wanted in dict.fromkeys([*alone, *others]):
        if wanted and len(wanted) < len(inputs):
            constant = ", ".join(str(n) for n in every if n not in wanted)
            compare(f"differentiable tensor {constant}", wanted, wanted, False)
    compare("the incoming gradient", every, every, True)


# For each layout of incoming gradients, a phrase for error messages and a function that copies a
# gradient into this layout. The phrase names an operation whose backward pass produces gradients in
# this layout.
GRADIENT_LAYOUTS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "expanded": ("as sum() passes it", lambda t: _repeated(t, range(t.dim()))),
    "expanded in dimension 0": ("as sum(0) passes it", lambda t: _repeated(t, range(t.dim())[:1])),
    "narrowed": ("as torch.cat passes it", sliced),
    "transposed": ("as .mT passes it", transposed),
    "at an offset": ("as torch.stack passes it", functools.partial(contiguous, offset=GUARD)),
}


def _repeated(values: Tensor, dims: Iterable[int]) -> Tensor:
    """Expand the first element along each dimension in `dims`, with stride 0.

    Allocate as much storage as a contiguous tensor needs and fill the unused part with NaN, so that
    a kernel that ignores the strides reads NaN instead of reading out of bounds.
    """
    memory = values.new_full((values.numel() + GUARD,), float("nan"))
    strides, first = [*contiguous_strides(values.shape)], values
    for dim in dims:
        strides[dim], first = 0, first.narrow(dim, 0, 1)
    memory.as_strided(first.shape, strides).copy_(first)
    return memory.as_strided(values.shape, strides)


def gradients_are_read_by_strides(call: Call, layout: str) -> None:
    """Check that the backward pass gives the same gradients if incoming gradients have `layout`.

    Try the results in turn, so that only one incoming gradient has this layout at a time.
    """
    function, inputs = call.function()
    when, laid_out = GRADIENT_LAYOUTS[layout]

    def backward(place: int, change: Callable[[Tensor], Tensor], seed: int = 0) -> Sequence[Any]:
        results = [result for result in function(*inputs) if result.requires_grad]
        given = [incoming_gradient(result) for result in results]
        if place < len(given):
            given[place] = change(laid_out(given[place]))
        seed_torch(seed)
        return torch.autograd.grad(results, inputs, given, allow_unused=True)

    def in_fresh_memory(grad: Tensor) -> Tensor:
        return grad.clone(memory_format=torch.contiguous_format)

    results = [result for result in function(*inputs) if result.requires_grad]
    for place, result in enumerate(results):
        if not probes.is_plain(result) or result.numel() < 2:
            continue
        try:
            laid_out(incoming_gradient(result))
        except CannotCheck:  # too few dimensions for this layout
            continue
        expected = backward(place, in_fresh_memory)
        what = f"an incoming gradient that is {layout}, {when}, of result {place}"
        try:
            actual = backward(place, lambda grad: grad)
        except Exception as error:
            raised = f"{type(error).__name__}: {error}".rstrip(".")
            text = f"{what}: backward raised {raised}. {_READ_BY_STRIDES}"
            raise AssertionError(text) from error
        problem = _difference(actual, expected, what)
        if not problem:
            continue
        # If backward passes give different gradients even for equal incoming gradients, they draw
        # random numbers. Then the difference does not prove that the layout is the cause.
        again = (backward(place, in_fresh_memory, seed) for seed in (0, 1))
        if not any(_difference(each, expected, what) for each in again):
            raise AssertionError(f"{problem}\n{_READ_BY_STRIDES}")


def _difference(actual: Sequence[Any], expected: Sequence[Any], what: str) -> str:
    try:
        # A kernel may round differently for another layout, so tolerate rounding errors of float16.
        # Ignoring the strides causes larger errors.
        tolerances: dict[str, Any] = {**probes.rounding(torch.half, expected)}
        probes.assert_same(actual, expected, what, **tolerances)
    except AssertionError as error:
        return str(error)
    return ""


_READ_BY_STRIDES = (
    "Backward must respect the strides of a gradient. If a kernel needs contiguous gradients, pass "
    "contiguous_grads=True to torchop's register_autograd, or call .contiguous() in backward."
)


def grad_strides(subject: Subject, details: Details) -> Iterator[Case]:
    """Does backward respect the strides of incoming gradients?"""
    needs_formula(subject)
    for example in subject.trainable_examples[:2]:
        for layout in GRADIENT_LAYOUTS:
            label, options = f"an incoming gradient that is {layout}", {"layout": layout}
            yield gradient_case(
                label, example, probe=gradients_are_read_by_strides, options=options
            )


def gradients_of_each_are_the_same(call: Call) -> None:
    """Check that an argument gets the same gradient if no other argument requires grad."""
    function, inputs = call.function()
    together = probes.gradients(function, inputs)
    for place, expected in enumerate(together):
        alone = [tensor.detach() for tensor in inputs]
        alone[place].requires_grad_()
        results = [result for result in function(*alone) if result.requires_grad]
        (actual,) = (
            torch.autograd.grad(probes.weighted_sum(results), alone[place], allow_unused=True)
            if results
            else (None,)
        )
        name = call.differentiable[place]
        what = f"the gradient of {name}, if only {name} requires grad"
        probes.assert_same([actual], [expected], what)


def gradients_are_made_anew(call: Call) -> None:
    """Check that each backward pass returns new gradients.

    A backward pass must neither overwrite the gradients of an earlier one nor add to them.
    """
    function, inputs = call.function()

    def backward(scale: float) -> Sequence[Any]:
        seed_torch(0)
        results = [result for result in function(*inputs) if result.requires_grad]
        given = [incoming_gradient(result) * scale for result in results]
        return torch.autograd.grad(results, inputs, given, allow_unused=True)

    first = backward(1.0)
    expected = probes.copies([grad for grad in first if grad is not None])
    end = time.perf_counter() + 0.2
    for number in range(150):
        again = backward(1.0 if number else -3.0)
        now = [grad for grad in first if grad is not None]
        try:
            probes.assert_same(now, expected, "the gradient, after a later backward")
        except AssertionError as error:
            raise AssertionError(
                f"{error} Backward returns memory that it writes again in its next call. Return a "
                "fresh tensor."
            ) from None
        if not number:
            continue
        try:
            probes.assert_same(again, first, f"the gradient in equal backward {number + 1}")
        except AssertionError as error:
            raise AssertionError(
                f"{error} Backward keeps values from call to call, for example in a buffer that it "
                "adds to. Start from zeros."
            ) from None
        if time.perf_counter() > end:
            break


def gradients_are_linear(call: Call) -> None:
    """Check that gradients are right if every incoming gradient is 1, or 0.

    A backward formula may have a separate branch for incoming gradients of 1 or 0. To check this
    branch, use that the backward pass is linear: the gradients for incoming gradients `g` and `1 -
    g` must add up to the gradients for incoming gradients of 1.
    """
    function, inputs = call.function()

    def backward(change: Callable[[Tensor], Tensor]) -> Sequence[Any]:
        seed_torch(0)
        results = [result for result in function(*inputs) if result.requires_grad]
        given = [change(incoming_gradient(result)) for result in results]
        return torch.autograd.grad(results, inputs, given, allow_unused=True)

    def constant(value: float) -> Sequence[Any]:
        return backward(lambda grad: torch.full_like(grad, value))

    first = backward(lambda grad: grad)
    pairs = list(zip(first, backward(lambda grad: 1 - grad), strict=True))
    sums = [one + other for one, other in pairs if one is not None and other is not None]
    zeros = [torch.zeros_like(total) for total in sums]
    limits: dict[str, Any] = {**probes.rounding(torch.half, first)}
    for value, expected in ((1, sums), (0, zeros)):
        given = zip(constant(value), pairs, strict=True)
        actual = [g for g, (one, other) in given if not any(t is None for t in (g, one, other))]
        if len(actual) == len(expected):
            what = f"the gradient if every incoming gradient is {value}"
            probes.assert_same(actual, expected, what, **limits)


def gradients_follow_values(call: Call) -> None:
    """Check gradients against finite differences after a backward pass with other values."""
    needs_finite_results(call)
    function, inputs = call.function()
    probes.gradients(function, inputs)
    problem = slope_problem(function, lambda place: moved_inputs(call, 0.1 * (place + 1)))
    if problem is not None:
        raise AssertionError(
            f"after a backward with other values, {problem} Backward keeps values from call to "
            "call. Pass them from setup_context instead."
        )


def grad_memory(subject: Subject, details: Details) -> Iterator[Case]:
    """Does each backward return gradients in fresh memory, whatever was called before?"""
    needs_formula(subject)
    subject.needs_fixed_results()
    for example in subject.trainable_examples[:2]:
        yield gradient_case("two backward calls", example, probe=gradients_are_made_anew)
    if subject.takes_double:
        needs_digits(subject)
        for example in subject.double_examples[:2]:
            yield gradient_case("other values", example, probe=gradients_follow_values)


def needs_input_grad(subject: Subject, details: Details) -> Iterator[Case]:
    """Are gradients and second derivatives the same if other arguments require no grad?"""
    needs_formula(subject)
    for example in subject.trainable_examples[:2]:
        if sum(tensor.requires_grad for tensor in example.tensors) > 1:
            yield gradient_case("the example", example, probe=gradients_of_each_are_the_same)
    with contextlib.suppress(CannotCheck):
        probe = second_derivatives_of_each_are_the_same
        yield from with_formula(subject, "second derivatives", probe, order=2)
    raise CannotCheck("no call has two tensors with a gradient")
