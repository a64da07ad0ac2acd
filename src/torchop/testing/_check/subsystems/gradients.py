"""Checks of gradients: against finite differences, in both modes, of both orders, recomputed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import checkpoint as checkpointing

from torchop import ForwardModeError, MissingFormulaError
from torchop.testing import probes
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject, reason
from torchop.testing._check.variants import in_layout, resized, sizes

# --------------------------------------------------------------------------------------------------
# Probes


def gradients_are_right(
    op: Any, args: Any, kwargs: Any, order: int = 1, forward: bool = False
) -> None:
    """Gradients agree with finite differences, here or, at a kink, a little beside it."""
    function, inputs = probes.as_function(op, args, kwargs)
    check: Any = torch.autograd.gradcheck if order == 1 else torch.autograd.gradgradcheck
    is_large = sum(tensor.numel() for tensor in inputs) > 40
    options: dict[str, Any] = {"fast_mode": is_large}
    if forward:
        options |= {"check_forward_ad": True, "check_backward_ad": False}
        options["check_undefined_grad"] = False

    def check_at(tensors: Any) -> None:
        if is_large and order == 1 and not forward:
            # first, because PyTorch needs minutes to find a wrong gradient
            probes.slope_is_right(function, tensors)
        check(function, tensors, **options)

    try:
        check_at(inputs)
    except RuntimeError:
        probes.seed_torch(1)
        beside = [t.detach() + 0.01 * torch.rand_like(t) for t in inputs]
        check_at([t.requires_grad_() for t in beside])


def checkpoints_the_same(op: Any, args: Any, kwargs: Any) -> None:
    """Activation checkpointing, which calls the operator again in the backward, changes nothing."""
    function, inputs = probes.as_function(op, args, kwargs)
    checkpoint = functools.partial(checkpointing.checkpoint, function)
    expected = probes.gradients(function, inputs)
    again = probes.gradients(functools.partial(checkpoint, use_reentrant=False), inputs)
    probes.assert_same(again, expected, "gradients with checkpointing")
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    probes.weighted_sum(checkpoint(*leaves, use_reentrant=True)).backward()
    reentrant = [leaf.grad for leaf in leaves]
    probes.assert_same(reentrant, expected, "gradients with reentrant checkpointing")


# --------------------------------------------------------------------------------------------------
# Cases


def needs_formula(subject: Subject, order: int = 1) -> None:
    """Raises CannotCheck if the operator has no gradient of an order."""
    example = subject.double_examples[0]
    try:
        function, inputs = probes.as_function(subject.op, *example.copy())
        results = [r for r in function(*inputs) if r.requires_grad]
        if not results:
            raise CannotCheck("no autograd formula that runs: its results do not require grad")
        for _ in range(order):
            total = probes.weighted_sum(results)
            grads = torch.autograd.grad(total, inputs, create_graph=True, allow_unused=True)
            results = [grad for grad in grads if grad is not None and grad.requires_grad]
            if not results:
                return
    except CannotCheck:
        raise
    except Exception as error:
        text = str(error)
        says_so = "no autograd formula" in text or "once_differentiable" in text
        is_stocks = "derivative for" in text and "not implemented" in text
        if says_so or is_stocks or isinstance(error, MissingFormulaError):
            raise CannotCheck(f"no autograd formula that runs: {reason(error)}") from None


def _needs_digits(subject: Subject) -> None:
    """Raises CannotCheck if results have too few digits for finite differences."""
    function, inputs = probes.as_function(subject.op, *subject.double_examples[0].copy())
    for result in function(*inputs):
        if result.requires_grad and torch.finfo(result.dtype).bits < 64:
            raise CannotCheck(
                f"its result is of {result.dtype} for arguments in double, which has too few "
                "digits for finite differences"
            )


def gradcheck(subject: Subject, details: Details) -> Iterator[Case]:
    """Do gradients agree with finite differences, also broadcast and with 0 elements?"""
    needs_formula(subject)
    _needs_digits(subject)
    examples = subject.double_examples[:3]
    for example in examples:
        yield Case("the example in double", gradients_are_right, example)
    for example in examples:
        for label, smaller in _broadcast(example):
            yield Case(label, gradients_are_right, smaller)
        for size in filter(None, sizes(example)):
            empty = _leaf(resized(example, {size: 0}))
            yield Case(f"dimensions of {size} with 0", gradients_are_right, empty)
        yield Case("transposed tensors", gradients_are_right, example, _transposed)


def gradgradcheck(subject: Subject, details: Details) -> Iterator[Case]:
    """Do second derivatives agree with finite differences?"""
    needs_formula(subject, 2)
    _needs_digits(subject)
    options = {"order": 2}
    example = subject.double_examples[0]
    yield Case("the example in double", gradients_are_right, example, options=options)


def _broadcast(example: Example) -> Iterator[tuple[str, Example]]:
    """One tensor with a dimension of size 1, which the operator may refuse."""
    tensors = example.tensors
    for place, tensor in enumerate(tensors if len(tensors) > 1 else ()):
        for dim, size in enumerate(tensor.shape[:3]):
            if size > 1 and tensor.dtype.is_floating_point:
                label = f"tensor {place} with size 1 in dimension {dim}"
                narrow = tensor.detach().narrow(dim, 0, 1).clone()
                yield label, _leaf(example.replace(place, narrow))


def _leaf(example: Example) -> Example:
    return example.map(
        lambda t: (
            t.detach().requires_grad_() if t.dtype.is_floating_point or t.dtype.is_complex else t
        )
    )


def _transposed(example: Example) -> Example:
    return _leaf(in_layout("transposed")(example.map(torch.Tensor.detach)))


def forward_mode(subject: Subject, details: Details) -> Iterator[Case]:
    """Does forward mode agree with finite differences?"""
    for example in subject.double_examples:
        function, inputs = probes.as_function(subject.op, *example.copy())
        plain = tuple(tensor.detach() for tensor in inputs)
        try:
            torch.func.jvp(function, plain, tuple(torch.ones_like(t) for t in plain))
        except Exception as error:
            text = str(error)
            says_so = "jvp" in text and ("implement" in text or "forward" in text)
            if says_so or isinstance(error, (ForwardModeError, NotImplementedError)):
                raise CannotCheck(f"no formula of forward mode: {reason(error)}") from None
        options = {"forward": True}
        yield Case("the example in double", gradients_are_right, example, options=options)


def checkpoint(subject: Subject, details: Details) -> Iterator[Case]:
    """Are gradients the same with activation checkpointing?"""
    needs_formula(subject)
    yield Case("the example in double", checkpoints_the_same, subject.double_examples[0])


CHECKS = family("subsystems", gradcheck, gradgradcheck, forward_mode, checkpoint)
