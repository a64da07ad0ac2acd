"""The smallest example on which a case still fails."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from torchop.testing._check.subject import Case, Example, Subject
from torchop.testing._check.variants import each_resized, sizes
from torchop.testing.probes import is_plain


def shrunk(
    case: Case, failure: Callable[[Case], Exception | None], seconds: float, subject: Subject
) -> Case:
    """The case with the smallest example found in that time for which `failure` has something.

    Sizes are made smaller, where several dimensions are equal all of them, and values simpler, as
    far as the examples are valid calls of the subject. A smaller example has to fail in the same
    way: with an exception of the same class.
    """
    before = failure(case)
    if before is None:
        return case  # it fails by chance, so nothing tells which example is smaller
    end = time.perf_counter() + seconds
    better = True
    while better:
        better = False
        for example in _smaller(case.example, subject):
            if time.perf_counter() > end:
                return case
            candidate = dataclasses.replace(case, example=example)
            if type(failure(candidate)) is type(before):
                case, better = candidate, True
                break
    return case


def _smaller(example: Example, subject: Subject) -> Iterator[Example]:
    """Simpler examples, the boldest first."""
    if len(example.args) > 1 and all(isinstance(arg, tuple) for arg in example.args):
        for call in example.args:  # of the calls of one program, one
            yield Example((call,), {})
    present = sorted(sizes(example), reverse=True)
    bold = {size: 2 for size in present if size > 2}
    if len(bold) > 1:
        yield from (smaller for _, smaller in each_resized(example, bold, subject=subject))
    for size in present:
        sizes_tried = dict.fromkeys((1, 2, 3, size // 2, size - 1))
        changes = [{size: new} for new in sizes_tried if 0 < new < size]
        yield from (smaller for _, smaller in each_resized(example, *changes, subject=subject))
    tensors = example.tensors
    for index, tensor in enumerate(tensors):
        simple = _simple(tensor)
        if simple is not None:
            yield example.replace(index, simple)


def _simple(tensor: Tensor) -> Tensor | None:
    """Small numbers in place of the elements; None if they are that, or no numbers to choose."""
    if not is_plain(tensor) or not tensor.dtype.is_floating_point or tensor.numel() < 1:
        return None  # an integer may be an index
    counted = torch.arange(1, tensor.numel() + 1, device=tensor.device) % 8
    simple = counted.to(tensor.dtype).view(tensor.shape)
    if tensor.detach().abs().max() <= 1:
        simple = simple / 8
    is_simple = torch.equal(tensor.detach(), simple) or torch.equal(tensor.detach() * 8, simple)
    return None if is_simple else simple.requires_grad_(tensor.requires_grad)
