"""Search for a smaller example that also fails a check."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchop.testing._check.calls import Example
from torchop.testing._check.cases import Case
from torchop.testing._check.sizes import each_resized, sizes
from torchop.testing.probes import is_plain, widened


def shrunk(case: Case, failure: Callable[[Case], Exception | None], seconds: float) -> Case:
    """Search for a smaller example that still fails, for at most `seconds` seconds.

    The search shrinks dimensions of equal size together, and replaces values with simpler ones. It
    accepts a candidate only if it fails with an exception of the same class.
    """
    before = failure(case)
    if before is None:
        return case  # the failure is flaky, so a smaller example that passes proves nothing
    end = time.perf_counter() + seconds
    better = True
    while better:
        better = False
        for example in _smaller(case.example):
            if time.perf_counter() > end:
                return case
            candidate = dataclasses.replace(case, example=example)
            if type(failure(candidate)) is type(before):
                case, better = candidate, True
                break
    return case


def _smaller(example: Example) -> Iterator[Example]:
    """Yield smaller and simpler versions of an example, with the largest reductions first."""
    present = sorted(sizes(example), reverse=True)
    bold = {size: 2 for size in present if size > 2}
    changes = [bold] if len(bold) > 1 else []
    for size in present:
        tried = dict.fromkeys((1, 2, 3, size // 2, size - 1))
        changes += [{size: new} for new in tried if 0 < new < size]
    yield from (smaller for _, smaller in each_resized(example, *changes))
    for index, tensor in enumerate(example.tensors):
        simple = _simple(tensor)
        if simple is not None:
            yield example.replace(index, simple)


def _simple(tensor: Tensor) -> Tensor | None:
    """Return a tensor of the same shape filled with simple numbers, such as 1, 2 and 3.

    Return None if the tensor already holds these numbers, or if it does not hold floating-point
    numbers.
    """
    if not is_plain(tensor) or not tensor.dtype.is_floating_point or tensor.numel() < 1:
        return None  # integers may be indices
    counted = torch.arange(1, tensor.numel() + 1, device=tensor.device) % 8
    numbers = widened(tensor.detach())
    simple = counted.to(numbers.dtype).view(tensor.shape)
    if numbers.abs().max() <= 1:
        simple = simple / 8
    is_simple = torch.equal(numbers, simple) or torch.equal(numbers * 8, simple)
    simple = simple.to(tensor.dtype)
    return None if is_simple else simple.requires_grad_(tensor.requires_grad)
