"""Markers that decide which tests `make test` runs; `--all-combinations` runs all of them.

    @pytest.mark.pairwise
    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("name", PROGRAMS)

`pairwise` runs just enough combinations to cover every pair of values of two parameters.

    @pytest.mark.exhaustive

`exhaustive` skips a slow test or `pytest.param` whose behaviour a faster test also covers.

Tests with the parameter `backend="inductor"` spend most of their time compiling C++ code for
PyTorch's own operators. To save that time, Inductor calls the existing operators in two thirds of
these tests, as it does with `torch.compile(mode="lite")`.

A parametrized test that loops over many objects can check a different part of the objects in each
case:

    for check in combinations.share(checks, SPECIMENS.index(specimen), 8, request.config):
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import pytest

from tests._support.releases import is_older

T = TypeVar("T")
OPTION = "--all-combinations"
# Backends of torch.compile. "eager" runs only Dynamo, which "aot_eager" also runs, so `make test`
# skips "eager".
BACKENDS = [pytest.param("eager", marks=pytest.mark.exhaustive), "aot_eager", "inductor"]
MARKERS = (
    "pairwise: of its combinations, runs so many that all pairs of values are there; "
    f"{OPTION} runs them all",
    f"exhaustive: a slow test of a behaviour that a faster test covers; runs only with {OPTION}",
    f"without_cpp: Inductor generates no C++; set for two thirds of its tests, without {OPTION}",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        OPTION, action="store_true", help="run all tests marked `pairwise` or `exhaustive`"
    )


def pytest_configure(config: pytest.Config) -> None:
    for marker in MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption(OPTION):
        return
    left_out = {item for item in items if item.get_closest_marker("exhaustive") is not None}
    for group in _groups([item for item in items if item not in left_out]).values():
        if group[0].get_closest_marker("pairwise") is not None:
            chosen = pairwise([item.callspec.params for item in group])
            left_out |= {item for number, item in enumerate(group) if number not in chosen}
            group = [item for item in group if item not in left_out]
        by_inductor = [item for item in group if item.callspec.params.get("backend") == "inductor"]
        for number, item in enumerate(by_inductor):
            # Before PyTorch 2.13, Inductor compiles in-place operators to C++ despite this marker.
            if number % 3 != 0 and not is_older("2.13"):
                item.add_marker("without_cpp")
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _groups(items: list[pytest.Item]) -> dict[Any, list[Any]]:
    tests: dict[Any, list[Any]] = defaultdict(list)
    for item in items:
        if hasattr(item, "callspec"):
            tests[item.path, item.originalname].append(item)  # type: ignore[attr-defined]
    return tests


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    if item.get_closest_marker("without_cpp") is None:
        return (yield)
    from torch._inductor import config

    with config.patch(fallback_by_default=True):
        return (yield)


def pairwise(combinations: Sequence[dict[str, Any]]) -> set[int]:
    """Choose combinations that cover every pair of values, and return their indices.

    The choice is deterministic, so every run executes the same tests.
    """
    chosen: set[int] = set()
    missing = [pairs(combination) for combination in combinations]
    while True:
        gains = [len(each) for each in missing]
        best = max(gains, default=0)
        if best == 0:
            return chosen
        chosen.add(gains.index(best))
        covered = missing[gains.index(best)]
        missing = [each - covered for each in missing]


def pairs(combination: dict[str, Any]) -> set[Any]:
    values = sorted((name, repr(value)) for name, value in combination.items())
    return set(itertools.combinations(values, 2))


def share(things: Sequence[T], turn: int, of: int, config: pytest.Config) -> list[T]:
    """Return every `of`-th thing, starting at `turn`, or all things with `--all-combinations`."""
    if config.getoption(OPTION):
        return list(things)
    return [thing for number, thing in enumerate(things) if number % of == turn % of]
