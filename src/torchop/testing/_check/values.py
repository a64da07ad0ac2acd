"""Checks of special values: NaN, infinity, zero, the smallest and the largest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.kinds import Details, family, variants
from torchop.testing._check.memory import comparison, passes
from torchop.testing._check.subject import CannotCheck, Case, Subject, breaks_contract, reason
from torchop.testing._check.variants import in_layout

# Special numbers, chosen by the limits of a dtype: lists, each of numbers that are tried together.
Choice = Callable[[torch.finfo], list[list[float]]]
_CHOICES: dict[str, tuple[str, Choice]] = {
    "nan": ("NaN", lambda limits: [[float("nan")]]),
    "inf": ("infinities", lambda limits: [[float("inf"), float("-inf")], [float("-inf")]]),
    "zeros": ("zeros of both signs", lambda limits: [[0.0, -0.0]]),
    "denormals": (
        "numbers too small to be normal",
        lambda limits: [[limits.tiny / 2, -limits.tiny / 4, limits.tiny / 8]],
    ),
    "extremes": (
        "the largest and smallest numbers of the dtype",
        # Not the largest and the smallest together: their sum depends on what is added first.
        lambda limits: [[limits.max, limits.tiny], [limits.min, limits.tiny]],
    ),
}


def with_numbers(numbers: Sequence[float], step: int, tensor: Tensor) -> Tensor:
    """The tensor with such numbers in one of so many elements."""
    flat = tensor.flatten().clone()
    places = range(0, flat.numel(), step)
    for index, place in enumerate(places):
        flat[place] = numbers[index % len(numbers)]
    return flat.view(tensor.shape)


def _values(name: str, subject: Subject, details: Details) -> Iterator[Case]:
    """Such values in each floating-point tensor; integers may be indices, and stay as they are."""
    words, choice = _CHOICES[name]
    for example in subject.accepted():
        for place, tensor in enumerate(example.tensors):
            is_float = tensor.dtype.is_floating_point and probes.is_plain(tensor)
            if not is_float or not 0 < tensor.numel() <= 4096:
                continue
            # What fails there with other numbers too is no fault of these.
            elsewhere = "sliced" if tensor.dim() else "offset"
            layout = elsewhere if passes(subject, example, in_layout(elsewhere)) else "contiguous"
            for numbers in choice(torch.finfo(tensor.dtype)):
                for step, amount in ((2, "with"), (1, "full of")):
                    changed = example.replace(place, with_numbers(numbers, step, tensor))
                    label = f"{subject.names(example)[place]} {amount} {words}"
                    yield comparison(subject, label, changed, in_layout(layout))
    raise CannotCheck("no argument is a small tensor of a floating-point dtype")


def takes_what_is_allowed(op: Any, args: Any, kwargs: Any, what: str) -> None:
    """The operator takes a call that its preconditions allow."""
    try:
        probes.outcome(op, args, kwargs)
    except Exception as error:
        if breaks_contract(error):
            raise
        raise AssertionError(
            f"{what}: the preconditions allow the call, and the kernel refuses it: {reason(error)}"
        ) from error


def declared(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it take all that its preconditions allow, and do the same wherever that lies?"""
    for example in subject.accepted():
        for words, limit in subject.at_limits(example):
            options = {"what": words}
            yield Case(
                words, takes_what_is_allowed, limit, None, options, calls=False, shrink=False
            )
            yield comparison(subject, words, limit, in_layout("contiguous"))


_QUESTIONS = {
    name: f"Does it do the same wherever {words} lie?" for name, (words, _) in _CHOICES.items()
}
CHECKS = (*variants("values", _QUESTIONS, _values), *family("values", declared))
