"""Whether tensors share memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.strategies import stable
from torch import Tensor

from torchop._family.overlap import Overlap, overlap, overlaps_itself

shapes = st.lists(st.integers(0, 3), max_size=3)
strides = st.integers(0, 5)
MEMORY = torch.zeros(64)


@st.composite
def windows(draw: Any) -> Tensor:
    """A tensor of any shape, strides and offset, in one small memory."""
    shape = draw(shapes)
    steps = [draw(strides) for _ in shape]
    return MEMORY.as_strided(shape, steps, draw(st.integers(0, 20)))


def places(tensor: Tensor) -> list[int]:
    """The place in memory of each element, counted one by one."""
    found = [tensor.storage_offset()]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        found = [place + index * stride for place in found for index in range(size)]
    return found


@stable
@given(windows())
def test_overlap_with_itself_is_told_exactly(tensor: Tensor) -> None:
    assert overlaps_itself(tensor) == (len(set(places(tensor))) < len(places(tensor)))


@stable
@given(windows(), windows())
def test_overlap_of_two_is_told_exactly(written: Tensor, read: Tensor) -> None:
    if overlaps_itself(written):
        return
    shared = set(places(written)) & set(places(read))
    same = places(written) == places(read) and written.shape == read.shape
    expected = Overlap.NOTHING
    if shared:
        expected = Overlap.EVERYTHING if same else Overlap.SOMETHING
    assert overlap(written, read) is expected


def test_memory_shared_through_numpy_is_found() -> None:
    array = np.zeros(4)
    assert overlap(torch.from_numpy(array[1:]), torch.from_numpy(array[:-1])) is Overlap.SOMETHING
    assert overlap(torch.from_numpy(array), torch.from_numpy(array)) is Overlap.EVERYTHING


def test_tensors_of_different_element_sizes_are_compared_by_bytes() -> None:
    memory = torch.zeros(4)
    as_bytes = memory.view(torch.uint8)
    assert overlap(memory[:2], as_bytes[7:]) is Overlap.SOMETHING
    assert overlap(memory[:2], as_bytes[8:]) is Overlap.NOTHING
    assert overlap(memory, as_bytes.view(torch.float32)) is Overlap.EVERYTHING


@pytest.mark.parametrize("device", ["meta", "sparse"])
def test_tensors_without_memory_share_none(device: str) -> None:
    tensor = torch.ones(3).to_sparse() if device == "sparse" else torch.ones(3, device=device)
    assert overlap(tensor, torch.ones(3)) is Overlap.NOTHING
    assert overlap(tensor, tensor) is Overlap.EVERYTHING
    assert not overlaps_itself(tensor)
