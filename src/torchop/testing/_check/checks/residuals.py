"""Checks of residuals, i.e. of kernel outputs that only the backward pass uses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchop import native
from torchop.extend import Operator
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.fakes import assert_same_metadata
from torchop.testing._check.checks.gradients import needs_formula
from torchop.testing._check.subject import Subject
from torchop.testing._samples import with_fake_tensors
from torchop.testing._saved import saved_bytes

# --------------------------------------------------------------------------------------------------
# Probes


def same_in_training(call: Call) -> None:
    """Check that a call returns bitwise the same results whether or not it computes residuals."""
    with torch.no_grad():
        expected = call.again()
    actual = call.again()
    probes.assert_same(actual, expected, "with gradients recorded", rtol=0, atol=0)


def residuals_stay(call: Call) -> None:
    """Check that residuals own their memory, so a later call cannot overwrite them."""
    form, flat = _training(call)
    residuals = _tensors(form, form.helper.overload(*flat[0], **flat[1]))
    before = [tensor.clone() for tensor in residuals]
    other = call.changed(
        lambda t: (probes.widened(t) + 1).to(t.dtype) if t.is_floating_point() else t.clone()
    )
    _, (args, kwargs) = _training(Call(call.op, *other))
    form.helper.overload(*args, **kwargs)
    probes.assert_same(
        residuals, before, "the residuals of a call, after a second call", rtol=0, atol=0
    )


def described_by_the_fake_kernel(call: Call) -> None:
    form, flat = _training(call)
    real = _tensors(form, form.helper.overload(*flat[0], **flat[1]))
    mode, (fake_args, fake_kwargs) = with_fake_tensors(flat)
    with mode:
        fake = _tensors(form, form.helper.overload(*fake_args, **fake_kwargs))
    assert_same_metadata(fake, real, "residual tensor")


def every_residual_is_read(call: Call) -> None:
    declared = _definition(call.op).declaration.residuals
    named, read = declared.named, set()

    class Watched(named):  # type: ignore[misc, valid-type]  # the base class is a variable
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
        with native.disabled():  # native calls bypass the Python class, so `Watched` sees no reads
            call.op(*call.args, **call.kwargs)
    finally:
        declared.named = named
    unread = [name for name in named._fields if name not in read]
    if unread:
        raise AssertionError(
            f"setup_context does not read the residuals {', '.join(unread)}. Read them from its "
            "parameter 'residuals', or do not return them."
        )


def _training(call: Call) -> tuple[Any, Any]:
    """Return the helper operator that also returns residuals, and its arguments for this call."""
    op, (args, kwargs) = call.op, call.example
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


# --------------------------------------------------------------------------------------------------
# This function yields the cases of the check of residuals (the calls that it makes). Reports print
# the first line of its docstring as the question that the check answers.


def residuals(subject: Subject, details: Details) -> Iterator[Case]:
    """Does setup_context read all residuals, and does the fake kernel describe them?"""
    definition = _definition(subject.op)
    if definition is None or definition.declaration.residuals is None:
        raise CannotCheck("it declares no residuals")
    needs_formula(subject)
    examples = subject.trainable_examples[:3]
    for example in examples:
        for label, probe in (
            ("the example", same_in_training),
            ("two calls", residuals_stay),
            ("on fake tensors", described_by_the_fake_kernel),
        ):
            yield Case(label, example, group="gradient", probe=probe)
    yield Case("the residuals that are read", examples[0], None, "gradient", every_residual_is_read)
    # Measure the saved bytes only after all cases, because the call raises for a faulty operator.
    args, kwargs = examples[0].copy()
    details["saved bytes"] = saved_bytes(subject.op, *args, **kwargs)
