"""Callers of an operator that out_op defined may pass its outputs. Uses private names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests.define.families import bounds
from torchop._define.forms import kernels


def _inference() -> Tensor:
    with torch.inference_mode():
        return torch.full((3,), 5.0)


def _both(x: Tensor) -> dict[str, Tensor]:
    memory = torch.full((13,), 5.0)
    return {"low": memory[:12].view(3, 4), "high": memory[10:]}


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "shape": (lambda x: torch.full((4,), 5.0), r"to have shape \[3\], but got \[4\] instead"),
    "rank": (lambda x: torch.full((1, 3), 5.0), r"shape \[3\], but got \[1, 3\]"),
    "dtype": (lambda x: torch.full((3,), 5), "dtype torch.float32, but got torch.int64 instead"),
    "device": (lambda x: torch.full((3,), 5.0, device="meta"), "device cpu, but got meta instead"),
    "layout": (lambda x: torch.full((3,), 5.0).to_sparse(), "layout torch.strided, but got torch"),
    "expanded": (lambda x: torch.full((1,), 5.0).expand(3), "more than one element of the written"),
    "windows": (lambda x: torch.full((9,), 5.0).as_strided((3,), (0,)), "single memory location"),
    "inference": (lambda x: _inference(), "Inplace update to inference tensor outside Inference"),
    "grad": (
        lambda x: torch.full((3,), 5.0, requires_grad=True),
        "functions with out=... arguments don't support automatic differentiation, but one of the "
        "arguments requires grad",
    ),
    "shifted": (lambda x: x._base[:3], "some elements of the input tensor and the written-to tens"),
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_unsuitable_buffer_is_rejected_unchanged(
    family: torchop.OperatorFamily, wrong: str
) -> None:
    make, message = WRONG[wrong]
    x = torch.full((4,), 5.0)[1:]
    out = make(x)
    with pytest.raises(RuntimeError, match=rf"sin\.out: .*{message}"):
        family(x, out=out)
    if not out.is_meta:
        assert out.detach().to_dense().unique().tolist() == [5]


def test_buffer_of_none_is_refused(family: torchop.OperatorFamily) -> None:
    with pytest.raises(TypeError, match="argument 'out' is None"):
        family.out(torch.ones(2), out=None)


def test_outputs_must_not_overlap_each_other(namespace: str) -> None:
    family = bounds(namespace)
    x = torch.randn(3, 4)
    outputs = _both(x)
    with pytest.raises(torchop.MutationError, match=r"'low' and argument 'high'.*single memory"):
        family(x, **outputs)
    assert outputs["high"].tolist() == [5, 5, 5]


def test_outputs_may_be_interleaved_with_inputs(family: torchop.OperatorFamily) -> None:
    memory = torch.randn(3, 2)
    x, out = memory[:, 0], memory[:, 1]
    expected = x.sin()
    assert torch.allclose(family(x, out=out), expected)
    inside = torch.empty(5, 3)
    assert torch.allclose(family(memory.t(), out=inside[1:3]), memory.t().sin())


@needs_native
def test_buffers_with_separate_memory_are_not_compared(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = bounds(namespace)
    x = torch.randn(3, 4)
    outputs = {"low": torch.empty(3, 4), "high": torch.empty(3)}
    family(x, **outputs)
    for tensor in outputs.values():
        tensor.untyped_storage()  # creates a Python object, which not every storage has
    allocations = []
    monkeypatch.setattr(kernels, "check_outputs", None)
    monkeypatch.setattr(kernels, "described_results", lambda *args: allocations.append(args))
    # A second call with equal shapes must not run the allocation rule again, nor compare storages.
    family(x, **outputs)
    assert allocations == []


def test_a_call_that_looks_different_is_compared_again(namespace: str) -> None:
    family = bounds(namespace)
    outputs = {"low": torch.empty(3, 4), "high": torch.empty(3)}
    for _ in range(2):
        family(torch.randn(3, 4), **outputs)
        with pytest.raises(torchop.MutationError, match=r"'high' to have shape \[3\], but got"):
            family(torch.randn(3, 4), low=outputs["low"], high=torch.empty(4))
        with pytest.raises(torchop.MutationError, match=r"'low' to have shape \[2, 4\], but got"):
            family(torch.randn(2, 4), **outputs)


def test_inplace_form_with_the_same_metadata_skips_the_check(
    namespace: str, family: torchop.OperatorFamily
) -> None:
    def write_sum(x: Tensor, y: Tensor, *, out: Tensor) -> None:
        torch.add(x, y, out=out)

    other = torchop.out_op(f"{namespace}::add", write_sum, like="y", inplace=True, elementwise=True)
    assert family.inplace is not None
    assert family.inplace._definition.declaration.guard is None
    assert other.inplace is not None
    with pytest.raises(torchop.MutationError, match=r"'x' to have shape \[3\], but got \[1\]"):
        other.inplace(torch.ones(1), torch.ones(3))


def test_buffers_in_inference_mode(family: torchop.OperatorFamily) -> None:
    out = _inference()
    with torch.inference_mode():
        family(torch.ones(3), out=out)
    assert torch.allclose(out, torch.ones(3).sin())


def test_read_only_memory_is_not_detected(family: torchop.OperatorFamily) -> None:
    array = np.zeros(2, dtype=np.float32)
    array.flags.writeable = False
    with pytest.warns(UserWarning, match="not writable"):
        out = torch.from_numpy(array)
    # PyTorch has only warned. Neither the tensor nor an array made from it records that the memory
    # is read-only, so the operator cannot reject it.
    assert out.numpy().flags.writeable
    assert torch.allclose(family(torch.ones(2), out=out), torch.ones(2).sin())


def test_inplace_form_rejects_promises_it_cannot_keep(namespace: str) -> None:
    for promise in (False, True):

        @torchop.out_op(
            f"{namespace}::half{int(promise)}",
            allocate=lambda x: torch.empty(x.shape, dtype=torch.get_default_dtype()),
            inplace=True,
            elementwise=promise,
        )
        def half(x: Tensor, *, out: Tensor) -> None:
            out.copy_(x / 2)

        numbers = torch.tensor([1, 2])
        assert half.inplace is not None
        with pytest.raises(
            torchop.MutationError, match=r"in-place tensor 'x' to have dtype torch.fl"
        ):
            half.inplace(numbers)
        assert numbers.tolist() == [1, 2]
        with pytest.raises(torchop.MutationError, match="more than one element"):
            half.inplace(torch.ones(1).expand(3))
