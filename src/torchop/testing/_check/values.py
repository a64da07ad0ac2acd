"""Checks of special values: NaN, infinity, zero, the smallest and the largest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.kinds import Details, variants
from torchop.testing._check.memory import comparison, passes
from torchop.testing._check.subject import CannotCheck, Case, Subject
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


_QUESTIONS = {
    name: f"Does it do the same wherever {words} lie?" for name, (words, _) in _CHOICES.items()
}
CHECKS = variants("values", _QUESTIONS, _values)
