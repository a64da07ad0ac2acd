"""Each word says what is wrong with a value, and makes a valid one of it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributions import constraints

from tests.strategies import stable
from torchop._rules.user.preconditions.base import Precondition, Satisfies, Unfit
from torchop.preconditions import (
    Contiguous,
    Dtype,
    Indices,
    Lengths,
    Like,
    Offsets,
    OneOf,
    Shape,
    Sorted,
    Unique,
)

OF_INTEGERS: list[Precondition] = [
    Indices("x"),
    Indices("x", least=-1),
    Offsets("x"),
    Offsets("x", last=False),
    Lengths("x"),
    Sorted(),
    Unique(),
    Satisfies(constraints.integer_interval(2, 5)),
    Satisfies(constraints.positive_integer),
]
OF_FLOATS: list[Precondition] = [
    Sorted(),
    Satisfies(constraints.unit_interval),
    Satisfies(constraints.half_open_interval(0, 1)),
    Satisfies(constraints.positive),
    Satisfies(constraints.less_than(-2.0)),
    Satisfies(constraints.simplex),
]
SIZES = st.integers(0, 6)


def check_fitted(word: Precondition, value: Any, arguments: dict[str, Any]) -> None:
    before = word.problem(value, arguments)
    try:
        made = word.fitted(value, arguments)
    except Unfit:
        assert before is not None
        return
    assert word.problem(made, arguments) is None
    assert (made.shape, made.dtype) == (value.shape, value.dtype)
    if before is None:
        assert torch.equal(made, value)


@pytest.mark.parametrize("word", OF_INTEGERS, ids=repr)
@stable
@given(values=st.lists(st.integers(-9, 9), max_size=6), size=SIZES)
def test_integers_are_made_valid(word: Precondition, values: list[int], size: int) -> None:
    value = torch.tensor(values, dtype=torch.int64)
    check_fitted(word, value, {"x": torch.ones(size, 2)})


@pytest.mark.parametrize("word", OF_FLOATS, ids=repr)
@stable
@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6))
def test_numbers_are_made_valid(word: Precondition, values: list[float]) -> None:
    check_fitted(word, torch.tensor(values, dtype=torch.float32), {})


@stable
@given(values=st.lists(st.floats(-9, 9, width=32), min_size=9, max_size=9))
def test_matrices_are_made_positive_definite(values: list[float]) -> None:
    check_fitted(Satisfies(constraints.positive_definite), torch.tensor(values).view(3, 3), {})
    with pytest.raises(Unfit):
        Satisfies(constraints.positive_definite).fitted(torch.ones(2, 3), {})


def test_unsigned_numbers_that_decrease_are_not_sorted() -> None:
    value = torch.tensor([3, 1, 2], dtype=torch.uint8)
    assert Sorted().problem(value, {}) == "its elements are not sorted"
    check_fitted(Sorted(), value, {})


X = torch.ones(4, 3)


@pytest.mark.parametrize(
    ("word", "value", "problem"),
    [
        (
            Indices("x"),
            [0, 4],
            "its elements go from 0 to 4, .* at least 0 and below 4, the",
        ),
        (Indices("x", 1), [3], r"below 3, the size of 'x' in dimension 1"),
        (Offsets("x"), [1, 4], "offsets must start with 0, but the first is 1"),
        (Offsets("x"), [0, 3, 2, 4], "offsets must not decrease"),
        (Offsets("x"), [0, 3], "offsets must end with 4, .*, but the last is 3"),
        (Offsets("x", last=False), [0, 5], "offsets must be at most 4, .*, but the last is 5"),
        (Lengths("x"), [2, 1], "lengths must add up to 4, .*, but their sum is 3"),
        (Lengths("x"), [5, -1], "lengths must not be negative, but one is -1"),
        (Sorted(), [2, 1], "its elements are not sorted"),
        (Unique(), [2, 2], "an element occurs more than once"),
        (Satisfies(constraints.unit_interval), [1.5], r"Interval\(.* does not hold"),
        (Satisfies(constraints.unit_interval), [float("nan")], r"Interval\(.* does not hold"),
        (Like("x"), [1.0], r"its shape is torch.Size\(\[1\]\), but that of 'x'"),
        (Like("x", "dtype"), [1], "its dtype is torch.int64, but that of 'x' is torch.float32"),
        (Dtype(torch.half), [1.0], "its dtype is torch.float32, which is not one of torch.float16"),
        (Shape("n", "m"), [1.0], "it has 1 dimensions instead of 2"),
        (Shape(2), [1.0], r"its shape is \[1\] instead of \[2\]"),
        (Shape("n", least=2), [1.0], "the size 'n' must be at least 2, got 1"),
    ],
)
def test_the_problem_of_a_value(word: Precondition, value: list[Any], problem: str) -> None:
    found = word.problem(torch.tensor(value), {"x": X})
    assert found is not None
    assert re.search(problem, found), found


def test_other_problems() -> None:
    assert OneOf("a", "b").problem("c", {}) == "'c' is not one of ('a', 'b')"
    assert Contiguous().problem(X.t(), {}) == "it is not contiguous"
    with pytest.raises(ValueError, match=r"OneOf\(...\) takes values, at least one; got \(\)"):
        OneOf()
    with pytest.raises(ValueError, match=r"Dtype\(...\) takes dtypes, at least one; got \('a',\)"):
        Dtype("a")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'shape', 'dtype' and 'device'; got \('x', 'size'\)"):
        Like("x", "size")  # type: ignore[arg-type]


def test_limits_are_the_ends_of_intervals() -> None:
    def ends(constraint: Any, dtype: torch.dtype = torch.float32) -> list[float]:
        value = torch.zeros(1, dtype=dtype)
        return [float(limit) for limit in Satisfies(constraint).limits(value, {})]

    assert ends(constraints.unit_interval) == [0.0, 1.0]
    low, high = ends(constraints.half_open_interval(0, 1))
    assert low == 0.0
    assert high < 1.0
    assert torch.nextafter(torch.tensor(high), torch.tensor(2.0)) == 1.0
    assert (
        ends(constraints.positive, torch.half)[0] == torch.finfo(torch.half).smallest_normal / 2**10
    )
    assert ends(constraints.integer_interval(1, 3), torch.int64) == [1, 3]
