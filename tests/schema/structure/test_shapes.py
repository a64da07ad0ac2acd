"""register_argument_type: objects of a user's class as arguments."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop
from torchop import ArgumentError, GradientError, SchemaError


class Box:
    """No dataclass: it hides what it is made of."""

    def __init__(self, low: int, high: int, weight: Optional[Tensor] = None) -> None:
        self._bounds = (low, high)
        self.weight = weight

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and self._bounds == other._bounds

    __hash__ = None  # type: ignore[assignment]


def parts(box: Box) -> dict[str, Any]:
    return {"low": box._bounds[0], "high": box._bounds[1], "weight": box.weight}


def make_box(low: int, high: int = 9, weight: Optional[Tensor] = None) -> Box:
    return Box(low, high, weight)


torchop.register_argument_type(Box, flatten=parts, unflatten=make_box)


@dataclasses.dataclass
class Config:
    box: Box
    other: Optional[Box] = None


def define(namespace: str, seen: list[Any]) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, box: Box, cfg: Config) -> Tensor:
        seen.extend([box, cfg])
        return x.clone() if box.weight is None else x * box.weight

    op.register_fake(lambda x, box, cfg: torch.empty_like(x))
    return op


def test_objects_of_the_class_are_taken_everywhere(namespace: str, tmp_path: Path) -> None:
    seen: list[Any] = []
    op = define(namespace, seen)
    assert "SymInt box_low, SymInt box_high=9, SymInt cfg_box_low" in op._schema

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, Box(1, 2), Config(Box(3, 4), Box(5, 6)))  # type: ignore[no-any-return]

    x = torch.ones(2)
    torch._dynamo.reset()
    Model()(x)
    torch.compile(Model(), fullgraph=True, backend="aot_eager")(x)
    torch.export.save(torch.export.export(Model(), (x,)), tmp_path / "model.pt2")
    torch.export.load(tmp_path / "model.pt2").module()(x)
    assert seen == [Box(1, 2), Config(Box(3, 4), Box(5, 6))] * 3


def test_gradients_are_by_the_names_of_parts(namespace: str) -> None:
    op = define(namespace, [])
    op.register_autograd(lambda ctx, grad: (None, {"weight": grad * 2}, None))
    weight = torch.ones(2, requires_grad=True)
    op(torch.ones(2), Box(1, 2, weight), Config(Box(3, 4))).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2, 2]
    op.register_autograd(lambda ctx, grad: (None, {"low": grad, "wait": None}, None))
    with pytest.raises(GradientError, match="mapping with the fields low, high, weight"):
        op(torch.ones(2), Box(1, 2, weight), Config(Box(3, 4))).sum().backward()


def test_what_is_no_such_object_is_refused(namespace: str) -> None:
    op = define(namespace, [])
    with pytest.raises(ArgumentError, match=r"cfg\.box: expected Box, got tuple"):
        op(torch.ones(1), Box(1, 2), Config((1, 2)))  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"box\.low: expected int, got str"):
        op(torch.ones(1), Box("1", 2), Config(Box(1, 2)))  # type: ignore[arg-type]


class Other:
    pass


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"low": 1}, "expected the keys high, low, which unflatten takes, got low"),
        ({"low": 1, "high": 2, "top": 3}, "which unflatten takes, got low, high, top"),
        ((1, 2), "expected a dict with the keys high, low, got tuple"),
    ],
)
def test_parts_that_unflatten_would_not_get_are_refused(
    namespace: str, returned: Any, message: str
) -> None:
    def make(low: int, high: int = 9) -> Other: ...

    torchop.register_argument_type(Other, flatten=lambda other: returned, unflatten=make)

    def function(x: Tensor, other: Other) -> Tensor: ...
    def with_default(x: Tensor, other: Other = Other()) -> Tensor: ...  # noqa: B008  (as it is)

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    with pytest.raises(ArgumentError, match=rf"::op: other: flatten of Other: .*{message}"):
        op(torch.ones(1), Other())
    with pytest.raises(SchemaError, match=rf"'other' has an unsupported default: .*{message}"):
        torchop.custom_op(f"{namespace}::other", with_default, mutates_args=())


@pytest.mark.parametrize(
    ("cls", "flatten", "unflatten", "error", "message"),
    [
        (3, parts, make_box, TypeError, "expects a class, got 3"),
        (Other, 3, make_box, TypeError, r"\(Other\): flatten must be a function, got 3"),
        (Other, parts, 3, TypeError, r"\(Other\): unflatten must be a function, got 3"),
        (int, parts, make_box, SchemaError, "operators accept int already"),
        (Other, parts, lambda low: None, SchemaError, "'low' of unflatten must have a type"),
        (Other, parts, lambda *low: None, SchemaError, r"'\*low' cannot take. Name the parts"),
    ],
)
def test_a_wrong_registration_is_refused(
    cls: Any, flatten: Any, unflatten: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        torchop.register_argument_type(cls, flatten=flatten, unflatten=unflatten)


def test_a_part_that_no_schema_can_hold_is_refused_where_it_is(namespace: str) -> None:
    def make(f: object) -> Other: ...

    torchop.register_argument_type(Other, flatten=vars, unflatten=make)

    def function(x: Tensor, other: Other) -> Tensor: ...

    with pytest.raises(SchemaError, match=r"'other' has unsupported type object at 'other\.f'"):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())
