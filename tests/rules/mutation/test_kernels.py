"""Version counters of mutated tensors and views."""

from typing import List, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import on_both
from tests._support.devices import BACKEND
from tests._support.releases import OUT, needs_tags


def one(x: Tensor, y: Tensor) -> None:
    pass


def listed(xs: List[Tensor], y: Tensor) -> None:
    pass


def with_gaps(xs: List[Optional[Tensor]], y: Tensor) -> None:
    pass


def optional(x: Optional[Tensor], y: Tensor) -> None:
    pass


def keyword_result(x: Tensor, y: Tensor) -> Tensor:
    return y.clone()


def versions(*tensors) -> list[int]:
    return [tensor._version for tensor in tensors]


CASES = {
    "one tensor": (one, "x", lambda a, b: a, [1, 0]),
    "a result too": (keyword_result, "x", lambda a, b: a, [1, 0]),
    "a list": (listed, "xs", lambda a, b: [a, b], [1, 1]),
    "a list with gaps": (with_gaps, "xs", lambda a, b: [None, a, None], [1, 0]),
    "an empty list": (listed, "xs", lambda a, b: [], [0, 0]),
    "an optional tensor": (optional, "x", lambda a, b: a, [1, 0]),
    "None": (optional, "x", lambda a, b: None, [0, 0]),
    "the same tensor twice": (listed, "xs", lambda a, b: [a, a], [2, 0]),
}


@pytest.mark.parametrize(("function", "mutated", "argument", "expected"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("by_keyword", [False, True], ids=["positional", "keyword"])
def test_versions_of_mutated_tensors_count_up_as_in_pytorch(
    namespace, function, mutated, argument, expected, by_keyword
):
    def scenario(library, namespace):
        op = library.custom_op(f"{namespace}::op", function, mutates_args=(mutated,))
        a, b, other = torch.zeros(2), torch.zeros(2), torch.zeros(2)
        value = argument(a, b)
        op(**{mutated: value}, y=other) if by_keyword else op(value, other)
        assert other._version == 0
        return versions(a, b)

    both = on_both(scenario, namespace)
    assert both.ours == expected
    assert both.stock == expected


@needs_tags
def test_a_keyword_only_tensor_counts_up_as_in_pytorch(namespace):
    def scenario(library, namespace):
        op = library.custom_op(
            f"{namespace}::op",
            lambda x, *, first, last: (first.copy_(x), last.copy_(x)),
            mutates_args=("first", "last"),
            schema="(Tensor x, *, Tensor(a!) first, Tensor(b!) last) -> (Tensor(a!), Tensor(b!))",
            tags=OUT,
        )
        x, first, last = torch.ones(2, requires_grad=True), torch.zeros(2), torch.zeros(2)
        saves_last = x * last
        op(torch.ones(2), first=first, last=last)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saves_last.sum().backward()
        return versions(first, last)

    both = on_both(scenario, namespace)
    assert both.ours == both.stock
    assert both.stock == [2, 2]  # one increment for the call, and one for `copy_`


def test_all_tensors_count_up_if_it_is_unknown_which_are_mutated(namespace):
    op = torchop.custom_op(f"{namespace}::op", one, mutates_args="unknown")
    x, y = torch.zeros(2), torch.zeros(2)
    op(x, y)
    assert versions(x, y) == [1, 1]


def test_version_counts_up_before_the_kernel_runs(namespace):
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> None:
        seen.append(x._version)
        raise ZeroDivisionError

    x = torch.zeros(2)
    with pytest.raises(ZeroDivisionError):
        op(x)
    assert seen == [1]


def test_operator_of_a_library_counts_no_versions(namespace):
    def scenario(library, namespace):
        home = library.Library(namespace, "FRAGMENT")
        home.define("op(Tensor(a!) x) -> ()")
        home.impl("op", lambda x: None, BACKEND)
        x = torch.zeros(2)
        getattr(torch.ops, namespace).op(x)
        home._destroy()
        return x._version

    both = on_both(scenario, namespace)
    assert both.ours == 0
    assert both.stock == 0


def test_inference_tensors_may_be_mutated(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("x",))
    def op(x: Tensor) -> None:
        x.add_(1)

    with torch.inference_mode():
        x = torch.zeros(2)
        op(x)
        assert x.tolist() == [1, 1]


def test_result_of_a_view_operator_is_a_view(namespace):
    op = torchop.custom_op(
        f"{namespace}::op",
        lambda x: x[0],
        mutates_args=(),
        schema="(Tensor(a) x) -> Tensor(a)",
    )
    base = torch.zeros(2, 2)
    view = op(base)
    assert view._is_view()
    assert view._base is base
    view.add_(1)
    assert base._version == 1
