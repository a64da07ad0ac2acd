"""Of the combinations of a test, each pair of values is run."""

from __future__ import annotations

import itertools
from typing import Any

from tests.combinations import pairs, pairwise

COMBINATIONS: list[dict[str, Any]] = [
    {"name": name, "form": form, "backend": backend}
    for name, form, backend in itertools.product(range(20), "abcd", ["eager", "aot", "inductor"])
    if (name, backend) != (3, "aot")  # pairs that no test has need not be there
]


def test_every_pair_is_there_in_few_combinations() -> None:
    chosen = pairwise(COMBINATIONS)
    everything = set().union(*map(pairs, COMBINATIONS))
    assert set().union(*(pairs(COMBINATIONS[number]) for number in chosen)) == everything
    assert len(chosen) <= 85
    assert pairwise(COMBINATIONS) == chosen


def test_a_test_that_was_asked_for_alone_runs() -> None:
    assert pairwise(COMBINATIONS[7:8]) == {0}
