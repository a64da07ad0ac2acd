"""Of the combinations of a test, each pair of values is run, and what its marker names."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.combinations import pairs, pairwise

COMBINATIONS: list[dict[str, Any]] = [
    {"name": name, "form": form, "backend": backend}
    for name, form, backend in itertools.product(range(20), "abcd", ["eager", "aot", "inductor"])
    if (name, backend) != (3, "aot")  # pairs that no test has need not be there
]


@pytest.mark.parametrize(("values", "most"), [({}, 85), ({"backend": "inductor"}, 120)])
def test_every_pair_is_there_in_few_combinations(values: dict[str, str], most: int) -> None:
    chosen = pairwise(COMBINATIONS, **values)
    everything = set().union(*map(pairs, COMBINATIONS))
    assert set().union(*(pairs(COMBINATIONS[number]) for number in chosen)) == everything
    assert len(chosen) <= most
    assert pairwise(COMBINATIONS, **values) == chosen


def test_what_is_named_is_there_completely() -> None:
    chosen = pairwise(COMBINATIONS, backend="inductor", form="b")
    named = [
        n for n, c in enumerate(COMBINATIONS) if c["backend"] == "inductor" and c["form"] == "b"
    ]
    assert len(named) == 20
    assert chosen.issuperset(named)


def test_a_test_that_was_asked_for_alone_runs() -> None:
    assert pairwise(COMBINATIONS[7:8], backend="inductor") == {0}
