"""A test with many parameters runs for a sample of their combinations.

The sample contains each pair of values of two parameters.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch._inductor.config  # noqa: F401  # imported once here, not by each run of pytest below

from tests._support.combinations import OPTION, pairs, pairwise

pytestmark = pytest.mark.project

pytest_plugins = ["pytester"]

COMBINATIONS: list[dict[str, Any]] = [
    {"name": name, "form": form, "backend": backend}
    for name, form, backend in itertools.product(range(20), "abcd", ["eager", "aot", "inductor"])
    if (name, backend) != (3, "aot")  # a pair of values that no combination contains
]


def test_few_combinations_contain_every_pair() -> None:
    chosen = pairwise(COMBINATIONS)
    everything = set().union(*map(pairs, COMBINATIONS))
    assert set().union(*(pairs(COMBINATIONS[number]) for number in chosen)) == everything
    assert len(chosen) <= 85
    assert pairwise(COMBINATIONS) == chosen


def test_single_selected_test_runs() -> None:
    assert pairwise(COMBINATIONS[7:8]) == {0}


@pytest.mark.needs_torch("2.13", "Inductor calls in-place operators in place of what it generates")
def test_a_third_of_the_inductor_tests_compile_cpp(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests._support.combinations import *")
    pytester.makepyfile(
        """
        import pytest
        from torch._inductor import config

        written = []

        @pytest.mark.pairwise
        @pytest.mark.parametrize("a", "xyz")
        @pytest.mark.parametrize("backend", ["eager", "inductor"])
        @pytest.mark.parametrize("c", [3, 4])
        def test_three(a, backend, c):
            written.append((backend, not config.fallback_by_default))

        @pytest.mark.parametrize("backend", ["inductor"])
        def test_one(backend):
            assert not config.fallback_by_default

        def test_count(request):
            assert not config.fallback_by_default
            counts = [written.count(one) for one in
                      [("eager", True), ("inductor", True), ("inductor", False)]]
            everything = request.config.getoption("all_combinations")
            assert counts == ([6, 6, 0] if everything else [3, 1, 2])
        """
    )
    pytester.runpytest_inprocess().assert_outcomes(passed=6 + 2, deselected=6)
    pytester.runpytest_inprocess(OPTION).assert_outcomes(passed=12 + 2)
