"""`explain` reports the path of calls that mutate an argument. Uses private names."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import needs_native
from tests.inspect.explain.checking import T, check
from torchop._compat import aliasing
from torchop._native.reasons import Reason

pytestmark = needs_native


def test_native_mutation(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args={"x", "ys"})
    def op(x: Tensor, ys: list[Tensor]) -> None:
        x.add_(1)

    x = torch.zeros(2)
    explanation = check(op, Reason.NATIVE, x, [torch.zeros(2)])
    assert explanation.kernels[1] == "versions: bumps x, ys"
    assert x.tolist() == [1, 1]


def test_mutation_in_inference_mode(write):
    x = torch.zeros(2)
    with torch.inference_mode():
        inference = torch.zeros(2)
        check(write, Reason.NATIVE, x)
        check(write, Reason.NATIVE, inference)
    assert x._version == 1
    explanation = check(write, Reason.MUTATION, inference)
    assert explanation.reason.endswith("'x', an inference tensor, outside of inference mode")


def test_mutation_in_inference_mode_with_a_tensor_from_outside(namespace):
    def add(x: Tensor, y: Tensor) -> None:
        x += y

    write, y = torchop.custom_op(f"{namespace}::op", add, mutates_args={"x"}), torch.ones(2)
    with torch.inference_mode():
        x = torch.zeros(2)
        # `x` is an inference tensor, so unlike `y` it has no version counter.
        check(write, Reason.NATIVE, x, y)
    assert x.tolist() == [1, 1]


OVERLAPPING = {
    "plain": (lambda: torch.zeros(6), False),
    "part": (lambda: torch.zeros(2, 4)[:, :2], False),
    "expanded": (lambda: torch.zeros(1).expand(3), True),
    "expanded, of one element": (lambda: torch.zeros(1, 2).expand(1, 2), False),
    "expanded, without elements": (lambda: torch.zeros(1, 0).expand(3, 0), False),
    # These rows overlap, but PyTorch does not detect this.
    "overlapping rows": (lambda: torch.zeros(6).as_strided((2, 3), (1, 1)), False),
}


@pytest.mark.parametrize("memory", OVERLAPPING)
def test_mutation_of_overlapping_memory_is_rejected(write, memory):
    make, is_refused = OVERLAPPING[memory]
    assert aliasing.overlaps_itself(make()) is is_refused
    explanation = check(write, Reason.MUTATION if is_refused else Reason.NATIVE, make())
    assert ("several elements in the same memory" in explanation.reason) is is_refused
    for way in (contextlib.nullcontext, torchop.native.disabled):
        refused = pytest.raises(RuntimeError, match="more than one element of the written-to")
        with refused if is_refused else contextlib.nullcontext(), way():
            write(make())


def test_mutation_with_an_input_in_the_same_memory(namespace):
    x, y = torch.zeros(6), torch.zeros(6)
    plain = torchop.custom_op(
        f"{namespace}::plain",
        lambda x, y: None,
        mutates_args={"x"},
        schema="(Tensor(a!) x, Tensor y) -> ()",
    )
    check(plain, Reason.NATIVE, x[2:], x[:4])
    inplace = torchop.custom_op(
        f"{namespace}::inplace_",
        lambda x, y: x,
        mutates_args={"x"},
        schema="(Tensor(a!) x, Tensor y) -> Tensor(a!)",
    )
    check(inplace, Reason.NATIVE, x, y)
    check(inplace, Reason.NATIVE, x, x)
    explanation = check(inplace, Reason.MUTATION, x[2:], x[:4])
    assert explanation.reason.endswith("argument 'x', sharing memory with another argument")
    # These slices share storage but do not overlap. Only the check in Python can tell, so the call
    # is not native.
    check(inplace, Reason.MUTATION, x[3:], x[:3])
    out = torchop.custom_op(
        f"{namespace}::out",
        lambda x, *, y, z: (y, z),
        mutates_args={"y", "z"},
        schema="(Tensor x, *, Tensor(a!) y, Tensor(b!) z) -> (Tensor(a!), Tensor(b!))",
    )
    check(out, Reason.NATIVE, x, y=x, z=y)
    check(out, Reason.MUTATION, T, y=x, z=x)
