"""When an example is resized, integers that depend on its sizes stay valid.

Uses private names.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import torchop
from tests._support.strategies import stable
from torchop.testing import check, probes
from torchop.testing._check.calls import CannotCheck, Example
from torchop.testing._check.layouts import LAYOUTS, lay_out
from torchop.testing._check.sizes import resized, sizes

LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


def changed(*tensors: Tensor, sizes: dict[int, int]) -> list[int]:
    return [int(n) for n in resized(Example(tensors, {}), sizes).tensors[-1]]


@stable
@given(lengths=LENGTHS, place=st.integers(0, 3), new=st.integers(0, 9))
def test_resizing_preserves_offsets(lengths: list[int], place: int, new: int) -> None:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = torch.randn(int(offsets[-1]), 31)
    assume(len(offsets) > 2)
    example = Example((rows, offsets), {})
    present = sizes(example)
    try:
        rows, offsets = resized(example, {present[place % len(present)]: new}).tensors
    except CannotCheck:
        return  # too few offsets would remain, or another dimension has the same size
    assert len(offsets) > 1
    assert (int(offsets[0]), int(offsets[-1])) == (0, len(rows))
    assert bool((offsets[1:] >= offsets[:-1]).all())


@stable
@given(lengths=LENGTHS, new=st.integers(0, 9), in_lengths=st.booleans())
def test_resizing_preserves_the_sum_of_lengths(
    lengths: list[int], new: int, in_lengths: bool
) -> None:
    rows = torch.randn(sum(lengths), 31)
    assume(len(lengths) != len(rows) and lengths != sorted(lengths))
    size = len(lengths) if in_lengths else len(rows)
    try:
        rows, made = resized(Example((rows, torch.tensor(lengths)), {}), {size: new}).tensors
    except CannotCheck:
        return
    assert int(made.sum()) == len(rows)
    assert len(made) == (new if in_lengths else len(lengths))


def test_resized_indices_stay_in_bounds() -> None:
    table, index = torch.randn(7, 3), torch.tensor([6, 0, 5, 2])
    assert changed(table, index, sizes={7: 2}) == [1, 0, 1, 1]
    assert changed(table, index, sizes={4: 6}) == [6, 0, 5, 2, 6, 0]
    with pytest.raises(CannotCheck, match="indices cannot refer to an empty tensor"):
        changed(table, index, sizes={7: 0})


def test_sorted_values_stay_sorted() -> None:
    edges = torch.tensor([10, 20, 40])
    assert changed(torch.randn(2), edges, sizes={3: 5}) == [10, 10, 20, 20, 40]
    assert probes.other_values([edges])[0].tolist() == [10, 20, 40]
    with pytest.raises(CannotCheck, match="cannot be expanded"):
        lay_out({0: "expanded"}, Example((edges,), {}))
    assert torch.equal(lay_out({0: "gaps"}, Example((edges,), {})).tensors[0], edges)


def test_permutations_stay_permutations() -> None:
    order = torch.tensor([2, 0, 3, 1])
    assert changed(torch.randn(4, 9), order, sizes={4: 6}) == [3, 0, 5, 2, 4, 1]
    assert changed(torch.randn(4, 9), order, sizes={4: 2}) == [1, 0]
    assert changed(torch.randn(4, 9), order, sizes={4: 0}) == []
    with pytest.raises(CannotCheck, match="a permutation cannot be expanded"):
        lay_out({0: "expanded"}, Example((order,), {}))


def test_ambiguous_integers_are_not_resized() -> None:
    either = torch.tensor([2, 0, 1])  # could be a permutation, or lengths of rows
    with pytest.raises(CannotCheck, match="integer arguments cannot be adapted"):
        changed(torch.randn(3, 9), either, sizes={3: 4})
    assert changed(torch.randn(3, 9), either, sizes={9: 4}) == [2, 0, 1]


def test_indices_whose_sum_is_a_size_are_adapted() -> None:
    table, index = torch.randn(6, 31), torch.tensor([1, 3, 2])
    assert changed(table, index, sizes={6: 5}) == [1, 3, 1]
    for smaller in (0, 1):
        with pytest.raises(CannotCheck):
            changed(table, index, sizes={6: smaller})
    # Sorted indices stay sorted when they are adapted.
    assert changed(table, torch.tensor([1, 2, 3]), sizes={6: 4}) == [1, 1, 2]


def test_resizing_preserves_the_sum_of_two_dimensional_lengths() -> None:
    lengths = torch.tensor([[2, 1, 0], [1, 1, 1]])
    for new, last in ((7, 2), (4, 0)):
        made = resized(Example((torch.randn(6), lengths), {}), {6: new}).tensors[-1]
        assert (made.shape, int(made[1, 2]), int(made.sum())) == ((2, 3), last, new)
    # [[3, 3]] may contain two lengths with the sum 6, or two indices, so it cannot be adapted.
    with pytest.raises(CannotCheck, match="integer arguments cannot be adapted"):
        resized(Example((torch.randn(6), torch.tensor([[3, 3]])), {}), {6: 3})


def test_int_argument_equal_to_the_sum_of_lengths_is_adapted() -> None:
    for segments in (torch.tensor([3, 1, 2]), torch.tensor([0, 3, 4, 6])):
        example = Example((torch.randn(6), segments, 6, True), {"total": 6, "other": 3})
        args, kwargs = resized(example, {6: 5})
        assert args[2:] == (5, True)
        assert kwargs == {"total": 5, "other": 3}
    alone = resized(Example((torch.randn(6), torch.tensor([4, -1]), 6), {}), {6: 5})
    assert alone.args[2] == 6


def test_unrelated_integers_are_changed_freely() -> None:
    values = torch.tensor([-3, 9, 4])
    assert changed(torch.randn(2), values, sizes={3: 4}) == [-3, 9, 4, -3]
    assert probes.other_values([values])[0].tolist() == [4, -3, 9]
    expanded = LAYOUTS["expanded"](values, False)
    assert torch.equal(lay_out({0: "expanded"}, Example((values,), {})).tensors[0], expanded)


def test_several_integer_tensors_are_not_rotated_if_floats_change() -> None:
    starts, counts = torch.tensor([4, 0, 1]), torch.tensor([2, 1, 3])
    x, ones = torch.tensor([0.5, 2.0]), torch.ones(2)
    kept = probes.other_values([x, starts, counts])
    assert [tensor.tolist() for tensor in kept] == [[2.0, 0.5], [4, 0, 1], [2, 1, 3]]
    moved = probes.other_values([ones, starts, counts])
    assert [tensor.tolist() for tensor in moved] == [[1.0, 1.0], [1, 4, 0], [3, 2, 1]]


def test_schema_violation_is_reported_by_one_check(namespace: str) -> None:
    op = torchop.custom_op(
        f"{namespace}::t",
        lambda x: x.t().contiguous(),
        mutates_args=(),
        schema="(Tensor x) -> Tensor",
    )
    op.register_fake(lambda x: x.new_empty(x.shape[1], x.shape[0]))
    only = ["contracts.schema", "memory.transposed", "memory.single"]
    report = check(op, (torch.randn(3, 4),), only=only, raise_exception=False)
    (failure,) = report.failures
    assert failure.check == "contracts.schema"
    assert "AliasError" in failure.message
    others = [r.message for r in report.results if r.check != "contracts.schema"]
    assert all("the call violates the schema; see contracts.schema" in m for m in others)
    alone = check(op, (torch.randn(3, 4),), only="memory.single", raise_exception=False)
    assert [failure.check for failure in alone.failures] == ["memory.single"]


def test_lengths_of_padded_rows_are_limited_by_the_row_length() -> None:
    rows, lengths = torch.ones(2, 3), torch.tensor([3, 2])
    assert changed(rows, lengths, sizes={3: 1}) == [1, 1]
    assert changed(rows, lengths, sizes={3: 0}) == [0, 0]
    assert changed(rows, lengths, sizes={2: 3}) == [3, 2, 3]


def test_tensor_with_offsets_is_not_replaced_by_a_scalar(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::parts", mutates_args=())
    def parts(x: Tensor, offsets: Tensor) -> Tensor:
        memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
        ends = offsets.tolist()
        return torch.stack([memory[a:b].sum() for a, b in itertools.pairwise(ends)])

    report = check(parts, (torch.arange(5.0), torch.tensor([0, 2, 5])), only=["zero_dim", "given"])
    assert report.results[-1].outcome == "cannot be done"
