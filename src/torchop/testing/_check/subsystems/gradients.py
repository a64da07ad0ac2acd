"""Checks of gradients: against finite differences, in both modes, of both orders, recomputed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from torchop._errors import ForwardModeError, MissingFormulaError
from torchop.testing._check.kinds import CheckKind, Details
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject, reason
from torchop.testing._check.variants import lay_out, resized, sizes
from torchop.testing.probes import as_function, assert_same, weighted_sum

# --------------------------------------------------------------------------------------------------
# Probes


def gradients_are_right(op: Any, args: Any, kwargs: Any, order: int = 1) -> None:
    """Gradients agree with finite differences, here or, at a kink, a little beside it."""
    function, inputs = as_function(op, args, kwargs)
    check = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    is_large = sum(tensor.numel() for tensor in inputs) > 40

    def check_at(tensors: Any) -> None:
        if is_large and order == 1:
            slope_is_right(
                function, tensors
            )  # first, as PyTorch takes minutes to say what is wrong
        check(function, tensors, fast_mode=is_large)

    try:
        check_at(inputs)
    except RuntimeError:
        torch.manual_seed(1)
        beside = [t.detach() + 0.01 * torch.rand_like(t) for t in inputs]
        check_at([t.requires_grad_() for t in beside])


def slope_is_right(function: Any, inputs: Any, step: float = 1e-6) -> None:
    """In a random direction, the gradient agrees with finite differences."""
    torch.manual_seed(2)
    directions = [torch.rand_like(tensor) for tensor in inputs]

    def total(steps: float) -> torch.Tensor:
        moved = [t + steps * step * d for t, d in zip(inputs, directions, strict=True)]
        return weighted_sum(function(*moved))

    gradients = torch.autograd.grad(total(0), inputs, allow_unused=True)
    pairs = zip(gradients, directions, strict=True)
    slope = sum(float((g.conj() * d).sum().real) for g, d in pairs if g is not None)
    with torch.no_grad():
        expected = float(total(1) - total(-1)) / (2 * step)
    if not abs(slope - expected) <= 1e-4 + 1e-3 * abs(expected):
        raise RuntimeError(
            f"in a random direction, the gradient is {slope:.6g}, but finite differences give "
            f"{expected:.6g}."
        )


def tangents_are_right(op: Any, args: Any, kwargs: Any) -> None:
    """Forward mode agrees with finite differences, here or, at a kink, a little beside it."""
    function, inputs = as_function(op, args, kwargs)
    options = {
        "check_forward_ad": True,
        "check_backward_ad": False,
        "check_undefined_grad": False,
        "fast_mode": sum(tensor.numel() for tensor in inputs) > 40,
    }
    try:
        torch.autograd.gradcheck(function, inputs, **options)
    except RuntimeError:
        torch.manual_seed(1)
        beside = [t.detach() + 0.01 * torch.rand_like(t) for t in inputs]
        torch.autograd.gradcheck(function, [t.requires_grad_() for t in beside], **options)


def checkpoints_the_same(op: Any, args: Any, kwargs: Any) -> None:
    """Activation checkpointing, which calls the operator again in the backward, changes nothing."""
    function, inputs = as_function(op, args, kwargs)
    expected = torch.autograd.grad(weighted_sum(function(*inputs)), inputs, allow_unused=True)
    again = checkpoint(function, *inputs, use_reentrant=False)
    actual = torch.autograd.grad(weighted_sum(again), inputs, allow_unused=True)
    assert_same(actual, expected, "gradients with checkpointing")
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    weighted_sum(checkpoint(function, *leaves, use_reentrant=True)).backward()
    gradients = [leaf.grad for leaf in leaves]
    assert_same(gradients, expected, "gradients with reentrant checkpointing")


# --------------------------------------------------------------------------------------------------
# Cases


def formula_problem(subject: Subject, order: int = 1) -> str | None:
    """Why the operator has no gradient of an order; None if it has."""
    example = subject.double_examples[0]
    try:
        function, inputs = as_function(subject.op, *example.copy())
        results = [r for r in function(*inputs) if r.requires_grad]
        if not results:
            return "its results do not require grad"
        for _ in range(order):
            results = list(
                torch.autograd.grad(
                    weighted_sum(results), inputs, create_graph=True, allow_unused=True
                )
            )
            results = [r for r in results if r is not None and r.requires_grad]
            if not results:
                return None
    except MissingFormulaError as error:
        return reason(error)
    except Exception as error:
        text = str(error)
        if "no autograd formula" in text or "once_differentiable" in text:
            return reason(error)
        if "derivative for" in text and "not implemented" in text:
            return reason(error)
    return None


def needs_formula(subject: Subject, order: int = 1) -> None:
    """Raises CannotCheck if the operator has no gradient of an order."""
    problem = formula_problem(subject, order)
    if problem is not None:
        raise CannotCheck(f"no autograd formula that runs: {problem}")


def _needs_digits(subject: Subject) -> None:
    """Raises CannotCheck if results have too few digits for finite differences."""
    function, inputs = as_function(subject.op, *subject.double_examples[0].copy())
    for result in function(*inputs):
        if result.requires_grad and torch.finfo(result.dtype).bits < 64:
            raise CannotCheck(
                f"its result is of {result.dtype} for arguments in double, which has too few "
                "digits for finite differences"
            )


def _gradients(order: int, subject: Subject, details: Details) -> Iterator[Case]:
    needs_formula(subject, order)
    _needs_digits(subject)
    options = {"order": order} if order > 1 else {}
    examples = subject.double_examples[: 3 if order == 1 else 1]
    for example in examples:
        yield Case("the example in double", gradients_are_right, example, options=options)
    if order > 1:
        return
    for example in examples:
        for label, smaller in _broadcast(example):
            yield Case(label, gradients_are_right, smaller)
        for size in sizes(example):
            if size:
                yield Case(
                    f"dimensions of {size} with 0",
                    gradients_are_right,
                    _leaf(resized(example, {size: 0})),
                )
        layouts = dict.fromkeys(range(len(example.tensors)), "transposed")
        if any(t.dim() > 1 for t in example.tensors):
            yield Case(
                "transposed tensors",
                gradients_are_right,
                example,
                functools.partial(_laid_out, layouts),
            )


def _broadcast(example: Example) -> Iterator[tuple[str, Example]]:
    """One tensor with a dimension of size 1, which the operator may refuse."""
    tensors = example.tensors
    if len(tensors) < 2:
        return
    for place, tensor in enumerate(tensors):
        for dim, size in enumerate(tensor.shape[:3]):
            if size > 1 and tensor.dtype.is_floating_point:
                narrow = tensor.detach().narrow(dim, 0, 1).clone()
                yield (
                    f"tensor {place} with size 1 in dimension {dim}",
                    _leaf(example.replace(place, narrow)),
                )


def _leaf(example: Example) -> Example:
    return example.map(
        lambda t: (
            t.detach().requires_grad_() if t.dtype.is_floating_point or t.dtype.is_complex else t
        )
    )


def _laid_out(layouts: dict[int, str], example: Example) -> Example:
    return _leaf(lay_out(layouts, example.map(lambda t: t.detach())))


def _tangents(subject: Subject, details: Details) -> Iterator[Case]:
    for example in subject.double_examples:
        function, inputs = as_function(subject.op, *example.copy())
        plain = tuple(tensor.detach() for tensor in inputs)
        try:
            torch.func.jvp(function, plain, tuple(torch.ones_like(t) for t in plain))
        except (ForwardModeError, NotImplementedError) as error:
            raise CannotCheck(f"no formula of forward mode: {reason(error)}") from None
        except Exception as error:
            text = str(error)
            if "jvp" in text and ("implement" in text or "forward" in text):
                raise CannotCheck(f"no formula of forward mode: {reason(error)}") from None
        yield Case("the example in double", tangents_are_right, example)


def _checkpoint(subject: Subject, details: Details) -> Iterator[Case]:
    needs_formula(subject)
    for example in subject.double_examples[:1]:
        yield Case("the example in double", checkpoints_the_same, example)


CHECKS = (
    CheckKind(
        "subsystems.gradcheck",
        "Do gradients agree with finite differences, also broadcast and with 0 elements?",
        functools.partial(_gradients, 1),
    ),
    CheckKind(
        "subsystems.gradgradcheck",
        "Do second derivatives agree with finite differences?",
        functools.partial(_gradients, 2),
    ),
    CheckKind(
        "subsystems.forward_mode", "Does forward mode agree with finite differences?", _tangents
    ),
    CheckKind(
        "subsystems.checkpoint",
        "Are gradients the same with activation checkpointing?",
        _checkpoint,
    ),
)
