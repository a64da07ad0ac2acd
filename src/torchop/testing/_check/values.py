"""Checks of special values: NaN, infinity, zero, the smallest and the largest."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchop.testing._check.kinds import CheckKind, Details
from torchop.testing._check.memory import comparison
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject
from torchop.testing._check.variants import lay_out

Choice = Callable[[Tensor], list[float]]


def _limits(tensor: Tensor) -> list[float]:
    limits = torch.finfo(tensor.dtype)
    return [limits.max, limits.min, limits.tiny]


def _denormals(tensor: Tensor) -> list[float]:
    tiny = torch.finfo(tensor.dtype).tiny
    return [tiny / 2, -tiny / 4, tiny / 8]


_CHOICES: dict[str, tuple[str, Choice]] = {
    "nan": ("NaN", lambda tensor: [float("nan")]),
    "inf": ("infinities", lambda tensor: [float("inf"), float("-inf")]),
    "zeros": ("zeros of both signs", lambda tensor: [0.0, -0.0]),
    "denormals": ("numbers too small to be normal", _denormals),
    "extremes": ("the largest and smallest numbers of the dtype", _limits),
}


def _with_values(
    name: str, choice: Choice, everywhere: bool, place: int, example: Example
) -> Example:
    """The example with such values in one tensor: everywhere, or in every other element."""
    tensor = example.tensors[place].clone()
    numbers = choice(tensor)
    flat = tensor.view(-1)
    for index in range(0, flat.numel(), 1 if everywhere else 2):
        flat[index] = numbers[index // (1 if everywhere else 2) % len(numbers)]
    return example.replace(place, tensor)


def _values(name: str, choice: Choice, subject: Subject, details: Details) -> Iterator[Case]:
    """Such values in each floating-point tensor; integers may be indices, and stay as they are."""
    for example in subject.accepted():
        tensors = example.tensors
        for place, tensor in enumerate(tensors):
            if not tensor.dtype.is_floating_point or not tensor.numel() or tensor.numel() > 4096:
                continue
            for everywhere in (False, True):
                changed = _with_values(name, choice, everywhere, place, example)
                amount = "full of" if everywhere else "with"
                label = f"tensor {place} {amount} {_CHOICES[name][0]}"
                layouts = dict.fromkeys(range(len(tensors)), "sliced" if tensor.dim() else "offset")
                yield comparison(subject, label, changed, functools.partial(lay_out, layouts))
    raise CannotCheck("no argument is a small tensor of a floating-point dtype")


CHECKS = tuple(
    CheckKind(
        f"values.{name}",
        f"Does it do the same wherever {words} lie?",
        functools.partial(_values, name, choice),
    )
    for name, (words, choice) in _CHOICES.items()
)
