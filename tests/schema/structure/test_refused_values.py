"""Errors about values of structured arguments name the path to the value."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests.schema.structure.structures import Checked, Mode, More, Plain, Point, Sides
from torchop import ArgumentError


@dataclasses.dataclass
class Everything:
    weight: Any = None
    scale: Any = 1.0
    scales: Any = dataclasses.field(default_factory=lambda: [1.0])
    mode: Any = Mode.LINEAR
    kind: Any = "up"
    box: Any = (1, 2)
    point: Any = Point(1)  # noqa: RUF009  (Point is immutable)
    table: Any = dataclasses.field(default_factory=lambda: {"a": 1.0})
    rows: Any = dataclasses.field(default_factory=lambda: [[1]])


Everything.__annotations__ = {
    "weight": Optional[Tensor],
    "scale": float,
    "scales": list[float],
    "mode": Mode,
    "kind": Literal["up", "down"],
    "box": tuple[int, int],
    "point": Point,
    "table": dict[str, float],
    "rows": list[list[int]],
}

WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "tensor": ({"weight": 1.0}, ArgumentError, r"cfg\.weight: expected torch.Tensor, got float"),
    "number": ({"scale": "1"}, ArgumentError, r"cfg\.scale: expected float, got str"),
    "None": ({"scale": None}, ArgumentError, r"cfg\.scale: expected float, got NoneType"),
    "item": (
        {"scales": [1.0, 2, "3"]},
        ArgumentError,
        r"cfg\.scales\[2\]: expected float, got str",
    ),
    "list": ({"scales": 1.0}, ArgumentError, r"cfg\.scales: expected a list or tuple, got float"),
    "Enum": ({"mode": "CUBIC"}, ArgumentError, r"cfg\.mode: expected .*Mode, got str"),
    "other Enum": ({"mode": Sides.LEFT}, ArgumentError, r"cfg\.mode: expected .*Mode, got .*Sides"),
    "Literal": (
        {"kind": "left"},
        ArgumentError,
        r"cfg\.kind: expected one of 'up', 'down', got 'left'",
    ),
    "length": ({"box": (1, 2, 3)}, ArgumentError, r"cfg\.box: expected 2 items, got 3"),
    "structure": ({"point": (1, 2.0)}, ArgumentError, r"cfg\.point: expected Point, got tuple"),
    "inside": ({"point": Point("1")}, ArgumentError, r"cfg\.point\.x: expected int, got str"),  # type: ignore[arg-type]
    "entry": ({"table": {"b": "c"}}, ArgumentError, r"cfg\.table\['b'\]: expected float, got str"),
    "key": ({"table": {1: 1.0}}, ArgumentError, r"cfg\.table: the key 1: expected str, got int"),
    "row": (
        {"rows": [[1], [2, "3"]]},
        ArgumentError,
        r"cfg\.rows\[1\]\[1\]: expected int, got str",
    ),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_an_error_names_the_path_inside_the_structure(namespace: str, what: str) -> None:
    changes, error, message = WRONG[what]

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: Everything) -> Tensor:
        return x.clone()

    op(torch.ones(1), Everything())
    with pytest.raises(error, match=f"^{namespace}::op: {message}"):
        op(torch.ones(1), Everything(**changes))


def test_subclass_is_rejected_because_it_would_become_its_base(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: Plain) -> Tensor:
        return x.clone()

    with pytest.raises(ArgumentError, match=r"cfg: expected Plain, got .*More"):
        op(torch.ones(1), More())
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'cfg'"):
        op(torch.ones(1))  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("flat", "error", "message"),
    [
        ({"cfg_mode": "QUICK"}, ArgumentError, r"'cfg_mode' \(cfg.mode\): expected one of"),
        (
            {"cfg_kind": "left"},
            ArgumentError,
            r"'cfg_kind' \(cfg.kind\): expected one of 'up'",
        ),
        ({"cfg_box": [1]}, ArgumentError, r"'cfg_box' \(cfg.box\): expected 2 items, got 1"),
        ({"cfg_table_keys": []}, ArgumentError, r"cfg.table: got 0 keys for 1 values"),
        ({"cfg_rows_lengths": [3]}, ArgumentError, r"cfg.rows: the lengths \[3\] do not add"),
        ({"size_size": -1}, ValueError, "size is negative"),
        ({"point_given": True}, ArgumentError, r"'point_x' \(point.x\): missing, although"),
    ],
)
def test_flat_values_are_checked_too(
    namespace: str, flat: dict[str, Any], error: type[Exception], message: str
) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(
        x: Tensor,
        cfg: Everything,
        size: Checked = Checked(1),  # noqa: B008
        point: Optional[Point] = None,
    ) -> Tensor:
        return x.clone()

    op.overload(torch.ones(1))
    with pytest.raises(error, match=message):
        op.overload(torch.ones(1), **flat)


def test_object_of_an_opaque_class_is_checked(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(2, generator=generator)

    assert re.search(r"Tensor x, (torch\._C\.)?Generator generator", op._schema)
    op(torch.ones(1), torch.Generator())
    # Before 2.13, schemas have a type for generators, so PyTorch raises an error of its own.
    message = r"generator: expected torch.*Generator, got int|'Generator'.*found type 'int'"
    with pytest.raises(ArgumentError, match=message):
        op(torch.ones(1), 3)  # type: ignore[arg-type]
