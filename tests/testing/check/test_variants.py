"""Checks vary the layouts and sizes of examples, and shrink examples that fail.

Uses private names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests._support.strategies import stable
from torchop.testing import probes
from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.cases import Case
from torchop.testing._check.layouts import LAYOUTS, lay_out
from torchop.testing._check.shrink import shrunk
from torchop.testing._check.sizes import larger_sizes, resized, sizes
from torchop.testing.probes import copies, memory_around

SHAPES = st.lists(st.integers(0, 3), max_size=4)


@stable
@given(shape=SHAPES, layout=st.sampled_from(sorted(LAYOUTS)), integers=st.booleans())
def test_layouts_preserve_values(shape: list[int], layout: str, integers: bool) -> None:
    tensor = torch.randn(shape)
    if integers:
        tensor = (tensor * 5).long()
    try:
        laid = LAYOUTS[layout](tensor, False)
    except CannotCheck:
        return
    assert (laid.shape, laid.dtype) == (tensor.shape, tensor.dtype)
    if layout == "expanded":
        dim = next(d for d, n in enumerate(shape) if n > 1)
        assert laid.stride(dim) == 0
        tensor = tensor.narrow(dim, 0, 1).expand(shape)
    assert torch.equal(laid.resolve_neg(), tensor)
    again = copies(laid)
    assert (again.stride(), again.storage_offset()) == (laid.stride(), laid.storage_offset())
    assert torch.equal(again, laid)
    around = memory_around(laid, [laid])
    if layout not in ("channels_last", "negative"):
        assert len(around) >= 8  # guard elements, which detect accesses out of bounds


def test_layouts_match_their_names() -> None:
    x = torch.arange(12.0).reshape(3, 4)
    assert LAYOUTS["transposed"](x, False).t().is_contiguous()
    assert LAYOUTS["gaps"](x, False).stride() == (8, 2)
    assert LAYOUTS["offset"](x, False).storage_offset() > 0
    assert LAYOUTS["negative"](x, False).is_neg()
    assert LAYOUTS["conjugate"](x.to(torch.complex64), False).is_conj()
    image = torch.ones(2, 3, 4, 5)
    assert LAYOUTS["channels_last"](image, False).is_contiguous(memory_format=torch.channels_last)
    around = torch.empty(0).set_(LAYOUTS["contiguous"](x, False).untyped_storage())[12:]
    assert around.isnan().all()
    around = torch.empty(0).set_(LAYOUTS["contiguous"](x, True).untyped_storage())[12:]
    assert (around == 3).all()


def test_memory_around_detects_writes_outside_a_tensor() -> None:
    laid = LAYOUTS["sliced"](torch.ones(2, 3), False)
    before = memory_around(laid, [laid])
    laid.add_(1)
    assert torch.equal(memory_around(laid, [laid]), before)
    torch.empty(0).set_(laid.untyped_storage())[0] = 5
    assert not torch.equal(memory_around(laid, [laid]), before)


def test_equal_sizes_change_together() -> None:
    example = Example((torch.ones(3, 4), torch.ones(4, 5)), {"bias": torch.ones(5)})
    assert sizes(example) == [3, 4, 5]
    smaller = resized(example, {4: 2, 5: 7})
    assert [list(t.shape) for t in smaller.tensors] == [[3, 2], [2, 7], [7]]
    with pytest.raises(CannotCheck, match="an empty dimension cannot grow"):
        resized(Example((torch.ones(0),), {}), {0: 2})


def test_other_values_rotates_elements() -> None:
    example = Example(*probes.other_values(((torch.arange(6.0).reshape(2, 3),), {})))
    assert example.args[0].tolist() == [[5, 0, 1], [2, 3, 4]]


def test_lay_out_changes_only_the_given_tensors() -> None:
    example = Example((torch.ones(2, 3), [torch.ones(2)]), {})
    laid = lay_out({1: "gaps"}, example)
    assert laid.args[0].is_contiguous()
    assert laid.args[1][0].stride() == (2,)
    with pytest.raises(CannotCheck, match="two dimensions"):
        lay_out({1: "transposed"}, example)


def _case(shape: tuple[int, ...]) -> Case:
    return Case("a case", Example((torch.randn(shape),), {}))


def test_shrinking_finds_the_smallest_size() -> None:
    def failure(case: Case) -> Exception | None:
        (x,) = case.example.args
        return ValueError() if x.shape[0] >= 3 else None

    (x,) = shrunk(_case((17, 5)), failure, 5.0).example.args
    assert list(x.shape) == [3, 1]
    assert x.flatten().tolist() == [1.0, 2.0, 3.0] or x.abs().max() <= 1


def test_shrinking_preserves_the_class_of_the_exception() -> None:
    def failure(case: Case) -> Exception | None:
        (x,) = case.example.args
        return ValueError() if x.shape[0] > 4 else TypeError()

    (x,) = shrunk(_case((9,)), failure, 5.0).example.args
    # Of the smaller sizes that were tried, 5 and 8 still raise ValueError.
    assert len(x) == 5 or len(x) == 8
    assert type(failure(shrunk(_case((9,)), failure, 5.0))) is ValueError


def test_shrinking_stops_after_its_time_or_if_nothing_fails() -> None:
    case = _case((9,))
    answers: list[Any] = [ValueError()]
    assert shrunk(case, lambda case: answers[0], -1.0).example is case.example
    assert shrunk(case, lambda case: None, 5.0) is case


def test_larger_sizes_limits_the_size_of_results() -> None:
    vectors = Example((torch.ones(3), torch.ones(3)), {})
    assert larger_sizes(vectors) == [{3: 1025}, {3: 65537}]
    # No larger sizes are tried, because two dimensions of the result have the size 3, so the
    # result would grow to 65537 x 65537 elements.
    assert larger_sizes(vectors, results=[torch.ones(3, 3)]) == []
    assert larger_sizes(vectors, results=[torch.ones(3, 2)]) == [{3: 1025}, {3: 65537}]
