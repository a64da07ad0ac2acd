"""Results with parts that are not tensors: None, numbers, strings, dtypes, devices and keys."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests.schema.structure.generated import same
from torchop import ResultError


class Mode(enum.Enum):
    ROWS = 1
    COLUMNS = 2


@dataclasses.dataclass
class Saved:
    value: Tensor
    tag: str


@dataclasses.dataclass
class Out:
    y: Tensor
    scale: Optional[Tensor]
    parts: list[Optional[Tensor]]
    saved: Optional[Saved]
    bits: int
    dtype: torch.dtype
    device: torch.device
    mode: Mode
    named: dict[str, Tensor]
    eps: float
    rows: Optional[int]
    shape: list[int]
    more: Optional[list[Tensor]]
    label: Optional[str]


def full(x: Tensor) -> Out:
    return Out(
        x * 2,
        x.sum(),
        [None, x * 3, None],
        Saved(x * 4, "kept"),
        8,
        torch.float16,
        torch.device("cpu"),
        Mode.COLUMNS,
        {"b": x * 6, "a": x * 5},
        0.5,
        7,
        [1, 2],
        [x * 7, x * 8],
        "label",
    )


def define(namespace: str, function: Callable[..., Any]) -> Any:
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(function)
    return op


def returning(**changes: Any) -> Callable[[Tensor], Out]:
    def function(x: Tensor) -> Out:
        made = {name: change(x) for name, change in changes.items()}
        return dataclasses.replace(full(x), **made)

    return function


DISAGREEMENTS = {
    "scale": (lambda x: None, r"the result\.scale is None, but the fake kernel returned a tensor"),
    "parts": (
        lambda x: [None, None, None],
        r"the result\.parts\[1\] is None, but the fake kernel returned a tensor",
    ),
    "saved": (lambda x: None, r"the result\.saved is None, but the fake kernel returned not None"),
    "bits": (lambda x: 4, r"the result\.bits is 4, but the fake kernel returned 8"),
    "dtype": (lambda x: torch.int8, r"the result\.dtype is torch\.int8, .* torch\.float16"),
    "mode": (lambda x: Mode.ROWS, r"the result\.mode is <Mode\.ROWS: 1>, .* <Mode\.COLUMNS"),
    "named": (lambda x: {"a": x * 5}, r"the result\.named is a dict with \('a',\), but"),
    "eps": (lambda x: 0.25, r"the result\.eps is 0\.25, but the fake kernel returned 0\.5"),
    "more": (lambda x: [x * 7], r"the result\.more is a list of 1, .* returned a list of 2"),
    "label": (lambda x: None, r"the result\.label is None, .* returned 'label' for the same"),
}


@pytest.mark.parametrize("field", list(DISAGREEMENTS))
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_kernel_that_disagrees_with_its_fake_kernel_is_an_error(
    namespace: str, field: str, dynamic: bool
) -> None:
    change, message = DISAGREEMENTS[field]
    op = torchop.custom_op(f"{namespace}::op", returning(**{field: change}), mutates_args=())
    op.register_fake(full)
    op(torch.ones(3))
    run = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    with pytest.raises(ResultError, match=message):
        run(torch.ones(3))
    op.register_fake(returning(**{field: change}))
    torch._dynamo.reset()
    torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=dynamic)(torch.ones(3))


WRONG = {
    "bits": (lambda x: "8", r"the result\.bits: expected int, got str"),
    "dtype": (lambda x: 5, r"the result\.dtype: expected torch\.dtype, got int"),
    "mode": (lambda x: "ROWS", r"the result\.mode: expected .*Mode, got str"),
    "parts": (lambda x: [1], r"the result\.parts\[0\]: expected torch\.Tensor, got int"),
    "named": (lambda x: {1: x}, r"the result\.named: the key 1: expected str, got int"),
    "shape": (lambda x: ["a"], r"the result\.shape\[0\]: expected int, got str"),
}


@pytest.mark.parametrize("field", list(WRONG))
def test_a_field_of_the_wrong_type_is_named(namespace: str, field: str) -> None:
    change, message = WRONG[field]
    op = define(namespace, returning(**{field: change}))
    with pytest.raises(ResultError, match=message):
        op(torch.ones(3))


@dataclasses.dataclass
class Sized:
    y: Tensor
    rows: int


@dataclasses.dataclass
class Shaped:
    y: Tensor
    shape: list[int]


def test_an_int_may_depend_on_a_size(namespace: str) -> None:
    def function(x: Tensor) -> Sized:
        return Sized(x + 1, 2 * x.shape[0])

    op = define(namespace, function)
    run = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    assert [run(torch.ones(rows)).rows for rows in (3, 4, 7)] == [6, 8, 14]


def test_other_parts_may_not_depend_on_a_size(namespace: str) -> None:
    def function(x: Tensor) -> Shaped:
        return Shaped(x + 1, list(x.shape))

    op = define(namespace, function)
    assert op(torch.ones(3)).shape == [3]
    run = torch.compile(op, fullgraph=True, backend="aot_eager", dynamic=True)
    with pytest.raises(
        Exception, match=r"the result\.shape is a symbolic number.* of type int outside of lists"
    ):
        run(torch.ones(3))


def test_equal_numbers_of_different_types_are_different_layouts(namespace: str) -> None:
    @dataclasses.dataclass
    class Number:
        y: Tensor
        value: float | int
        sign: float

    def function(x: Tensor, kind: str) -> Number:
        values = {"int": 1, "float": 1.0}
        return Number(x + 1, values.get(kind, 0), -0.0 if kind == "negative" else 0.0)

    function.__annotations__["return"] = Number
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    for kind in ("int", "float", "negative", "int"):
        assert same(op(torch.ones(1), kind), function(torch.ones(1), kind))
