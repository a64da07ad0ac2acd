"""Checks of residuals: what kernels return for the backward alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop import native
from torchop.extend import Operator
from torchop.testing import probes
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.subject import CannotCheck, Case, Subject
from torchop.testing._check.subsystems.gradients import needs_formula
from torchop.testing._samples import with_fake_tensors
from torchop.testing._saved import saved_bytes

# --------------------------------------------------------------------------------------------------
# Probes


def same_in_training(op: Any, args: Any, kwargs: Any) -> None:
    """The result is the same, bit by bit, where residuals are computed and where they are not."""
    with torch.no_grad():
        expected = probes.outcome_of_copies(op, args, kwargs)
    actual = probes.outcome_of_copies(op, args, kwargs)
    probes.assert_same(actual, expected, "where a gradient is recorded", rtol=0, atol=0)


def residuals_stay(op: Any, args: Any, kwargs: Any) -> None:
    """The residuals of a call are fresh tensors, which no later call changes."""
    form, flat = _training(op, args, kwargs)
    residuals = _tensors(form, form.companion.overload(*flat[0], **flat[1]))
    before = [tensor.clone() for tensor in residuals]
    args, kwargs = probes.mapped(
        flat, lambda tensor: tensor + 1 if tensor.is_floating_point() else tensor.clone()
    )
    form.companion.overload(*args, **kwargs)
    probes.assert_same(residuals, before, "the residuals of one call after another", rtol=0, atol=0)


def described_by_the_fake_kernel(op: Any, args: Any, kwargs: Any) -> None:
    """The fake kernel describes the residuals as they are."""
    form, flat = _training(op, args, kwargs)
    real = _tensors(form, form.companion.overload(*flat[0], **flat[1]))
    mode, (fake_args, fake_kwargs) = with_fake_tensors(flat)
    with mode:
        fake = _tensors(form, form.companion.overload(*fake_args, **fake_kwargs))
    names = form.declared.named._fields
    if len(real) != len(fake):
        raise AssertionError(
            f"the kernel returned {len(real)} tensors among its residuals ({', '.join(names)}), "
            f"and the fake kernel {len(fake)}."
        )
    for place, pair in enumerate(zip(real, fake, strict=True)):
        described, expected = map(_metadata, reversed(pair))
        if described != expected:
            raise AssertionError(
                f"residual tensor {place} of {', '.join(names)}: the fake kernel says {described}, "
                f"but the kernel returned {expected}."
            )


def every_residual_is_read(op: Any, args: Any, kwargs: Any) -> None:
    """The setup_context of the formula reads every residual."""
    declared = _definition(op).declaration.residuals
    named, read = declared.named, set()

    class Watched(named):  # type: ignore[misc, valid-type]  # known at run time
        def __getattribute__(self, name: str) -> Any:
            read.update({name} & set(named._fields))
            return super().__getattribute__(name)

        def __iter__(self) -> Iterator[Any]:
            read.update(named._fields)
            return iter(tuple.__iter__(self))

        def __getitem__(self, index: Any) -> Any:
            read.update(named._fields)
            return super().__getitem__(index)

    declared.named = Watched
    try:
        with native.disabled():  # whose plan has the class from before
            op(*args, **kwargs)
    finally:
        declared.named = named
    unread = [name for name in named._fields if name not in read]
    if unread:
        raise AssertionError(
            f"nobody uses the residuals {', '.join(unread)}: no setup_context with the parameter "
            "'residuals' reads them, so they cost memory and time in vain."
        )


def _training(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The training form, and its arguments for a call of the operator."""
    definition = _definition(op)
    form = definition.declaration.residuals.training_form(definition)
    if definition.structure is not None and op is definition.handle:
        args, kwargs = definition.structure.flat_arguments(*args, **kwargs)
    return form, probes.mapped((tuple(args), dict(kwargs)), Tensor.detach)


def _definition(op: Any) -> Any:
    handle = Operator(op, "residuals").handle
    return None if handle is None else handle._definition


def _tensors(form: Any, result: Any) -> list[Tensor]:
    return probes.tensors_of(form.split(result)[1])  # the residuals


def _metadata(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.stride()


# --------------------------------------------------------------------------------------------------
# Cases


def residuals(subject: Subject, details: Details) -> Iterator[Case]:
    """Are residuals fresh, described by the fake kernel, and used, and results the same?"""
    definition = _definition(subject.op)
    if definition is None or definition.declaration.residuals is None:
        raise CannotCheck("it declares no residuals")
    needs_formula(subject)
    examples = subject.trainable_examples[:3]
    for example in examples:
        yield Case("the example", same_in_training, example)
        yield Case("two calls", residuals_stay, example)
        yield Case("on fake tensors", described_by_the_fake_kernel, example)
    yield Case("what is read", every_residual_is_read, examples[0])
    args, kwargs = examples[0].copy()  # last, because a wrong operator may raise here too
    details["saved bytes"] = saved_bytes(subject.op, *args, **kwargs)


CHECKS = family("subsystems", residuals)
