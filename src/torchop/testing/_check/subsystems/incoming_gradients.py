"""Checks of the gradients that backward gets: in other memory layouts than the contiguous one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.subject import CannotCheck, Case, Subject
from torchop.testing._check.subsystems.gradients import incoming_gradient, needs_formula
from torchop.testing._check.variants import (
    GUARD,
    contiguous,
    contiguous_strides,
    sliced,
    transposed,
)
from torchop.testing.process_state import seed_torch

# --------------------------------------------------------------------------------------------------
# Probes

# Where the memory of an incoming gradient lies, and what passes such a gradient.
GRADIENT_LAYOUTS: Mapping[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "expanded": ("as sum() passes it", lambda t: _repeated(t, range(t.dim()))),
    "expanded in dimension 0": ("as sum(0) passes it", lambda t: _repeated(t, range(t.dim())[:1])),
    "narrowed": ("as torch.cat passes it", sliced),
    "transposed": ("as .mT passes it", transposed),
    "at an offset": ("as torch.stack passes it", functools.partial(contiguous, offset=GUARD)),
}


def _repeated(values: Tensor, dims: Iterable[int]) -> Tensor:
    """The first elements of dimensions, repeated by stride 0.

    The memory is as large as that of all elements, so that a kernel which ignores the strides reads
    NaN there and nothing beyond.
    """
    memory = values.new_full((values.numel() + GUARD,), float("nan"))
    strides, first = [*contiguous_strides(values.shape)], values
    for dim in dims:
        strides[dim], first = 0, first.narrow(dim, 0, 1)
    memory.as_strided(first.shape, strides).copy_(first)
    return memory.as_strided(values.shape, strides)


def gradients_are_read_by_strides(op: Any, args: Any, kwargs: Any, layout: str) -> None:
    """Backward computes the same from an incoming gradient in this layout as from a contiguous one.

    One result after another gets such a gradient, and the others get contiguous ones.
    """
    function, inputs = probes.as_function(op, args, kwargs)
    when, laid_out = GRADIENT_LAYOUTS[layout]

    def backward(place: int, change: Callable[[Tensor], Tensor]) -> Sequence[Any]:
        results = [result for result in function(*inputs) if result.requires_grad]
        given = [incoming_gradient(result) for result in results]
        if place < len(given):
            given[place] = change(laid_out(given[place]))
        seed_torch(0)
        return torch.autograd.grad(results, inputs, given, allow_unused=True)

    def in_fresh_memory(grad: Tensor) -> Tensor:
        return grad.clone(memory_format=torch.contiguous_format)

    results = [result for result in function(*inputs) if result.requires_grad]
    for place, result in enumerate(results):
        if not probes.is_plain(result) or result.numel() < 2:
            continue
        try:
            laid_out(incoming_gradient(result))
        except CannotCheck:  # the result has too few dimensions
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
        # A backward that draws random numbers of its own cannot be compared.
        if problem and not _difference(backward(place, in_fresh_memory), expected, what):
            raise AssertionError(f"{problem}\n{_READ_BY_STRIDES}")


def _difference(actual: Sequence[Any], expected: Sequence[Any], what: str) -> str:
    """The difference between gradients, in words; empty if they agree up to rounding."""
    try:
        # Kernels may round in another order, and a wrong stride changes much more.
        tolerances: dict[str, Any] = {**probes.rounding(torch.half, expected)}
        probes.assert_same(actual, expected, what, **tolerances)
    except AssertionError as error:
        return str(error)
    return ""


_READ_BY_STRIDES = (
    "Backward must read a gradient by its strides. If a kernel needs contiguous gradients, pass "
    "contiguous_grads=True to torchop's register_autograd, or call .contiguous() in backward."
)


# --------------------------------------------------------------------------------------------------
# Cases


def grad_strides(subject: Subject, details: Details) -> Iterator[Case]:
    """Does backward respect the strides of the gradients that it gets?"""
    needs_formula(subject)
    for example in subject.trainable_examples[:2]:
        for layout in GRADIENT_LAYOUTS:
            label = f"an incoming gradient that is {layout}"
            options = {"layout": layout}
            yield Case(label, gradients_are_read_by_strides, example, options=options)


CHECKS = family("subsystems", grad_strides)
