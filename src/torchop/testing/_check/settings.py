"""The check that results do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from torchop.testing import probes
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.larger import repeated_results
from torchop.testing._check.subject import Case, Subject
from torchop.testing._check.variants import each_resized, larger_sizes, sizes_changed
from torchop.testing.process_state import restored

# PyTorch starts a thread for each 32,768 elements.
_FOR_THREE_THREADS, _SIZES_FOR_THREADS = 2**16, (16385, 65537)


def ignores_num_threads(
    op: Any, args: Any, kwargs: Any, draws: bool = False, is_large: bool = False, **tolerances: Any
) -> None:
    """The call does the same with any number of threads.

    What it `draws` may differ. What `is_large` may be added up in another order, and of equal
    elements, another one may be chosen.
    """

    def call() -> Any:
        def told(tensor: torch.Tensor) -> torch.Tensor:
            differs = draws or (is_large and not tensor.is_floating_point())
            return torch.zeros_like(tensor) if differs else tensor

        return probes.mapped(probes.outcome_of_copies(op, args, kwargs), told)

    expected = call()
    if is_large:
        tolerances = {**probes.rounding(torch.float16, expected), **tolerances}
    for number in (1, 2, 3, 5):
        with restored():
            torch.set_num_threads(number)
            actual = call()
        words = f"with torch.set_num_threads({number})"
        probes.assert_same(actual, expected, words, **tolerances)


def num_threads(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do the same with any number of threads?"""
    for example in subject.accepted(most=1):
        options = {"draws": subject.is_random, **subject.tolerances}
        yield Case("the example", ignores_num_threads, example, options=options)
        results = probes.tensors_of(subject.first_results(example))
        changes = larger_sizes(example, _SIZES_FOR_THREADS, results)
        for change, larger in each_resized(example, *changes, subject=subject):
            most = max(tensor.numel() for tensor in larger.tensors)
            # With sizes that do not fit, a kernel in C++ may read what lies beyond.
            if most > _FOR_THREE_THREADS and repeated_results(subject, example, *change):
                options = {**options, "is_large": True}
                yield Case(sizes_changed(change), ignores_num_threads, larger, options=options)
                break


CHECKS = family("contracts", num_threads)
