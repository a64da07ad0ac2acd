from __future__ import annotations

import dataclasses
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.opaque_types import Constant, Reference
from torchop import ArgumentError


@dataclasses.dataclass
class Both:
    reference: Reference
    constant: Constant


def reference(x: Tensor, cfg: Reference) -> Tensor:
    return x * cfg.number


def constant(x: Tensor, cfg: Constant) -> Tensor:
    return x * cfg.number


def both(x: Tensor, cfg: Both) -> Tensor:
    return x * cfg.reference.number * cfg.constant.number


OBJECTS: dict[str, tuple[Any, Any, int]] = {
    "reference": (reference, Reference(6), 6),
    "constant": (constant, Constant(6), 6),
    "both": (both, Both(Reference(2), Constant(3)), 6),
}


@pytest.mark.parametrize("what", ["reference", "constant"])
def test_an_object_of_another_class_is_refused(namespace: str, what: str) -> None:
    function, _, _ = OBJECTS[what]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    with pytest.raises(ArgumentError, match=rf"cfg: expected .*{what.title()}, got .*Both"):
        op(torch.ones(1), Both(Reference(2), Constant(3)))
    with pytest.raises(ArgumentError, match=r"argument 'cfg': expected .*, got str"):
        op.overload(torch.ones(1), "6")


@dataclasses.dataclass
class Scaled:
    values: Tensor
    cfg: Reference | None


def test_fake_kernels_return_objects_that_are_arguments(namespace: str) -> None:
    def scale(x: Tensor, cfg: Reference, keep: bool) -> Scaled:
        return Scaled(x * cfg.number, cfg if keep else None)

    op = torchop.custom_op(f"{namespace}::op", scale, mutates_args=())
    op.register_fake(lambda x, cfg, keep: Scaled(torch.empty_like(x), cfg if keep else None))
    compiled = torch.compile(lambda x, cfg: op(x, cfg, True), fullgraph=True, backend="aot_eager")
    cfg = Reference(2)
    assert compiled(torch.ones(1), cfg).cfg is op(torch.ones(1), cfg, True).cfg is cfg
    assert op(torch.ones(1), cfg, False).cfg is None


# --------------------------------------------------------------------------------------------------
# Objects inside structures, lists and dicts


@torchop.opaque
class Scale:
    def __init__(self, number: float) -> None:
        self.number = number


@torchop.opaque(value=True)
@dataclasses.dataclass(frozen=True)
class Power:
    number: int = 1


@dataclasses.dataclass
class Config:
    weight: Tensor
    scale: Scale
    power: Power
    other: Optional[Scale] = None


@dataclasses.dataclass
class Output:
    y: Tensor
    config: Optional[Config]
    scales: tuple[Scale, ...]
    some: Optional[list[Optional[Scale]]]
    powers: list[Power]


def in_rows(x: Tensor, values: list[Config]) -> Tensor:
    numbers = [c.scale.number**c.power.number + (c.other is not None) for c in values]
    return x * sum(numbers)


def in_a_dict(x: Tensor, values: dict[str, Scale]) -> Tensor:
    return x * sum(len(name) * scale.number for name, scale in values.items())


def in_a_list(x: Tensor, values: list[Optional[Scale]]) -> Tensor:
    return x * sum(scale.number for scale in values if scale is not None)


def in_a_tuple(x: Tensor, values: tuple[Scale, Scale]) -> Tensor:
    assert type(values) is tuple
    return x * values[0].number / values[1].number


def in_an_optional_list(x: Tensor, values: Optional[list[Power]]) -> Tensor:
    return x * (9 if values is None else values[0].number)


ONE = torch.ones(1)
PLACES: dict[str, tuple[Any, Any, float]] = {
    "rows": (
        in_rows,
        [Config(ONE, Scale(2), Power(3)), Config(ONE, Scale(1), Power(1), Scale(4))],
        10,
    ),
    "no rows": (in_rows, [], 0),
    "dict": (in_a_dict, {"a": Scale(2), "bc": Scale(3)}, 8),
    "list": (in_a_list, [Scale(2), None, Scale(3)], 5),
    "tuple": (in_a_tuple, (Scale(6), Scale(2)), 3),
    "optional list": (in_an_optional_list, [Power(4)], 4),
    "no list": (in_an_optional_list, None, 9),
}


@pytest.mark.parametrize("place", PLACES)
def test_arguments_may_hold_objects(namespace: str, place: str) -> None:
    function, values, factor = PLACES[place]
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(lambda x, values: torch.empty_like(x))
    for call in (op, torch.compile(op, fullgraph=True, backend="inductor")):
        assert call(ONE, values).item() == factor


@pytest.mark.parametrize(
    ("function", "values", "message"),
    [
        (in_rows, [Config(ONE, Power(), Power())], r"values\.scale: expected .*Scale, got .*Power"),  # type: ignore[arg-type]
        (in_a_dict, {"a": None}, r"values\['a'\]: expected .*Scale, got None"),
        (in_a_list, [3], r"values\[0\]: expected .*Scale, got int"),
        (in_a_tuple, (Scale(1),), r"values: expected 2 items, got 1"),
    ],
)
def test_the_error_names_the_place_of_an_object(
    namespace: str, function: Any, values: Any, message: str
) -> None:
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    with pytest.raises(ArgumentError, match=message):
        op(ONE, values)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_results_may_hold_objects(namespace: str, backend: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=("config.scale",))
    def op(x: Tensor, config: Optional[Config], given: bool) -> Output:
        if config is not None:
            config.scale.number += 1
        scale = Scale(7) if config is None else config.scale
        config = Config(x * 2, scale, Power(2))
        if not given:
            return Output(x + 1, None, (), None, [])
        some = [None, Scale(8)]
        return Output(x + 1, config, (Scale(9), config.scale), some, [Power(3)])

    @op.register_fake
    def _(x: Tensor, config: Optional[Config], given: bool) -> Output:
        y = torch.empty_like(x)
        if not given:
            return Output(y, None, (), None, [])
        config = Config(torch.empty_like(x), Scale(0), Power(2))
        return Output(y, config, (Scale(0), Scale(0)), [None, Scale(0)], [Power(3)])

    compiled = torch.compile(op, fullgraph=True, backend=backend)
    result = compiled(ONE, None, True)
    assert result.config.scale.number == 7
    assert result.config.power == Power(2)
    assert result.config.other is None
    assert [scale.number for scale in result.scales] == [9, 7]
    assert result.some[0] is None
    assert result.some[1].number == 8
    assert result.powers == [Power(3)]
    given = Config(ONE, Scale(1), Power(2))
    result = compiled(ONE, given, True)
    assert result.config.scale is given.scale
    assert given.scale.number == 2
    assert compiled(ONE, given, False) == Output(ONE + 1, None, (), None, [])
    assert given.scale.number == 3


def test_gradients_reach_tensors_beside_objects(namespace: str) -> None:
    @dataclasses.dataclass
    class Scaled:
        y: Tensor
        scale: Scale

    def function(x: Tensor, scale: Scale) -> Scaled:
        return Scaled(x * scale.number, Scale(1))

    function.__annotations__ = {"x": Tensor, "scale": Scale, "return": Scaled}
    Scaled.__annotations__ = {"y": Tensor, "scale": Scale}
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(lambda x, scale: Scaled(torch.empty_like(x), scale))
    op.register_autograd(lambda ctx, grad: (grad.y * 5, None))
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        x = ONE.clone().requires_grad_()
        call(x, Scale(2)).y.sum().backward()
        assert x.grad is not None
        assert x.grad.item() == 5


def test_an_object_inside_a_list_of_structures_in_a_result_is_refused(namespace: str) -> None:
    def function(x: Tensor) -> list[Config]:
        return []

    with pytest.raises(
        torchop.SchemaError, match=r"\[\*\]\.scale is an object .* a list of objects"
    ):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())
