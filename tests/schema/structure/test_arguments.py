from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import TYPE
from tests.schema.structure.structures import (
    Checked,
    Frozen,
    Mode,
    OwnInit,
    Plain,
    Point,
    Slotted,
    State,
    WithTensor,
    recorder,
    same,
    with_calls,
)

# For each annotation of a parameter: the arguments in the schema that replace the parameter, and
# values that must reach the kernel unchanged.
TYPES: dict[str, tuple[Any, str, list[Any]]] = {
    "dataclass": (Frozen, "*, float a_scale, SymInt a_count=3", [Frozen(1.5, 2)]),
    "nested": (
        Plain,
        "*, float a_scale=1.0, str[]? a_names=None, float a_inner_scale=2.0, "
        "SymInt a_inner_count=3",
        [Plain(), Plain(2.0, ["x", ""], Frozen(-1.0))],
    ),
    "slots": (Slotted, "*, float a_scale, SymInt a_count", [Slotted(1.0, 2)]),
    "post_init": (Checked, "*, SymInt a_size", [Checked(4)]),
    "__init__": (OwnInit, "*, SymInt a_size", [OwnInit(4)]),
    "no init": (State, "*, SymInt a_size, SymInt a_calls=0", [State(1), with_calls(2, 3)]),
    "optional": (
        Optional[Frozen],
        "*, bool a_given, float? a_scale=None, SymInt a_count=3",
        [None, Frozen(1.0, 7)],
    ),
    "NamedTuple": (Point, "*, SymInt a_x, float a_y=0.5", [Point(3), Point(1, 2.0)]),
    "dict": (dict[str, float], "*, str[] a_keys, float[] a_values", [{}, {"b": 1.0, "a": 2.0}]),
    "pair": (tuple[int, int], "SymInt[] a", [(1, 2)]),
    "tuple": (tuple[float, ...], "float[] a", [(), (1.0, 2.0)]),
    "optional pair": (Optional[tuple[int, int]], "SymInt[]? a", [None, (1, 2)]),
    "strings": (list[str], "str[] a", [[], ["a", "é"]]),
    "optional strings": (Optional[list[str]], "str[]? a", [None, [], ["a"]]),
    "Literal": (Literal["up", "down"], "str a", ["up", "down"]),
    "Literal of ints": (Literal[1, 2], "SymInt a", [1, 2]),
    "optional Literal": (Literal["up", None], "str? a", ["up", None]),
    "Enum": (Mode, "str a", [Mode.LINEAR, Mode.CUBIC]),
    "optional Enum": (Optional[Mode], "str? a", [None, Mode.CUBIC]),
    "some of an Enum": (Literal[Mode.CUBIC], "str a", [Mode.CUBIC]),
    "number": (Union[int, float], "Scalar a", [1, 1.5, -0.0]),
    "optional number": (Union[int, float, None], "Scalar? a", [None, 2]),
    "complex": (complex, "Scalar a", [1j, 2 + 3j]),
    "Size": (torch.Size, "SymInt[] a", [torch.Size([2, 3])]),
    "layout": (torch.layout, "Layout a", [torch.strided, torch.sparse_csr]),
    "memory format": (torch.memory_format, "MemoryFormat a", [torch.channels_last]),
    "dtypes": (list[torch.dtype], "str[] a", [[torch.float32, torch.int8], []]),
    "tensors": (tuple[Tensor, ...], "Tensor[] a", [(torch.ones(1), torch.ones(2)), ()]),
    "two tensors": (tuple[Tensor, Tensor], "Tensor[] a", [(torch.ones(1), torch.ones(2))]),
    "optional tensors": (
        Optional[tuple[Tensor, ...]],
        "Tensor[] a, *, bool a_given",
        [None, (), (torch.ones(1), torch.ones(2))],
    ),
    "parameter": (torch.nn.Parameter, "Tensor a", [torch.nn.Parameter(torch.ones(1))]),
    "lists": (
        list[list[int]],
        "*, SymInt[] a_values, SymInt[] a_lengths",
        [[], [[]], [[1], [], [2, 3]]],
    ),
    "pairs": (
        tuple[tuple[float, float], ...],
        "*, float[] a_values, SymInt[] a_lengths",
        [(), ((1.0, 2.0), (3.0, 4.0))],
    ),
    "Annotated": (
        Annotated[tuple[Annotated[int, "rows"], int], "shape"],
        "SymInt[] a",
        [(1, 2)],
    ),
    "tensor fields": (
        WithTensor,
        "Tensor a_weight, Tensor? a_bias=None",
        [WithTensor(torch.ones(1)), WithTensor(torch.ones(1), torch.ones(2))],
    ),
    "dict of tensors": (
        dict[str, Tensor],
        "Tensor[] a_values, *, str[] a_keys",
        [{}, {"b": torch.ones(1), "a": torch.ones(2)}],
    ),
    "optional dict of tensors": (
        Optional[dict[str, Tensor]],
        "Tensor[] a_values, *, bool a_given, str[]? a_keys=None",
        [None, {}, {"b": torch.ones(1)}],
    ),
    "optional list of tensors": (
        Optional[list[Tensor]],
        "Tensor[]? a",
        [None, [], [torch.ones(1), torch.ones(2)]],
    ),
    "dataclasses": (
        list[Frozen],
        "*, float[] a_scale, SymInt[] a_count",
        [[], [Frozen(1.5, 2), Frozen(2.5, 4)]],
    ),
    "dataclasses with tensors": (
        tuple[WithTensor, ...],
        "Tensor[] a_weight, Tensor?[] a_bias",
        [(), (WithTensor(torch.ones(1)), WithTensor(torch.ones(1), torch.ones(2)))],
    ),
    "optional dataclasses": (
        Optional[list[Frozen]],
        "*, bool a_given, float[]? a_scale=None, SymInt[]? a_count=None",
        [None, [], [Frozen(1.5, 2)]],
    ),
    "optional tensor fields": (
        Optional[WithTensor],
        "Tensor? a_weight=None, Tensor? a_bias=None, *, bool a_given",
        [None, WithTensor(torch.ones(1), torch.ones(2))],
    ),
}


@pytest.mark.parametrize("kind", list(TYPES))
def test_kernel_gets_the_callers_objects(namespace: str, kind: str) -> None:
    annotation, written, values = TYPES[kind]
    seen: list[Any] = []
    op = torchop.custom_op(f"{namespace}::op", recorder(annotation, seen), mutates_args=())
    assert f"(Tensor x, {written}) -> Tensor" in op._schema.replace("  ", " ")
    x = torch.ones(2)
    for value in values:
        op(x, value)
        op(a=value, x=x)
        with torchop.native.disabled():
            op(x, value)
        assert len(seen) == 3
        assert all(same(found, value) for found in seen)
        seen.clear()


@pytest.mark.parametrize("kind", list(TYPES))
def test_a_call_compiles_with_every_type(namespace: str, kind: str) -> None:
    annotation, _, values = TYPES[kind]
    seen: list[Any] = []
    op = torchop.custom_op(f"{namespace}::op", recorder(annotation, seen), mutates_args=())
    op.register_fake(lambda x, a: torch.empty_like(x))
    value = values[-1]

    @torch.compile(fullgraph=True, backend="eager")
    def call(x: Tensor, value: Any) -> Tensor:
        return op(x, value) * 2

    assert call(torch.ones(2), value).tolist() == [2, 2]
    assert len(seen) == 1
    if "tensor" in kind or kind == "parameter":
        torch.testing.assert_close(seen[0], value)
    else:
        assert same(seen[0], value)


@pytest.mark.parametrize("kind", [k for k in TYPES if "tensor" not in k and k != "parameter"])
def test_a_file_holds_plain_values(namespace: str, kind: str, tmp_path: Path) -> None:
    annotation, _, values = TYPES[kind]
    seen: list[Any] = []
    op = torchop.custom_op(f"{namespace}::op", recorder(annotation, seen), mutates_args=())
    op.register_fake(lambda x, a: torch.empty_like(x))

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, values[-1])

    torch.export.save(torch.export.export(Model(), (torch.ones(2),)), tmp_path / "model.pt2")
    torch.export.load(tmp_path / "model.pt2").module()(torch.ones(2))
    assert len(seen) == 1
    assert same(seen[0], values[-1])


def test_kernel_gets_the_functions_defaults(namespace: str) -> None:
    seen: list[Any] = []

    def function(
        x: Tensor,
        inner: Frozen = Frozen(9.0),  # noqa: B008
        names: list[str] = ["a"],  # noqa: B006  (mutated by the test)
        sizes: tuple[int, int] = (3, 4),
        limit: float = float("inf"),
        mode: Mode = Mode.CUBIC,
        table: dict[str, int] = {"n": 1},  # noqa: B006
        maybe: Optional[Point] = None,
        other: Optional[Point] = Point(4),  # noqa: B008
    ) -> Tensor:
        seen.append((inner, names, sizes, limit, mode, table, maybe, other))
        return x.clone()

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    expected = (Frozen(9.0), ["a"], (3, 4), float("inf"), Mode.CUBIC, {"n": 1}, None, Point(4))
    op(torch.ones(1))
    op.overload(torch.ones(1))
    assert [same(found, expected) for found in seen] == [True, True]
    # If a kernel mutates its default list, later calls are not affected, because each call gets a
    # new list.
    seen[1][1].append("b")
    op.overload(torch.ones(1))
    assert seen[2][1] == ["a"]


def test_a_value_that_equals_the_default_of_the_schema_reaches_every_kernel(
    namespace: str,
) -> None:
    seen: list[Any] = []

    def function(x: Tensor, inner: Frozen, sizes: tuple[int, int] = (3, 4)) -> Tensor:
        return x.clone()

    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())

    @op.register_kernel(TYPE)
    def _(x: Tensor, inner: Frozen, sizes: tuple[int, int] = (8, 8)) -> Tensor:
        seen.append((inner.count, sizes))
        return x.clone()

    op(torch.ones(1), Frozen(1.0, 3), (3, 4))
    op(torch.ones(1), Frozen(1.0, 3))
    with torchop.native.disabled():
        op(torch.ones(1), Frozen(1.0, 3), (3, 4))
    assert seen == [(3, (3, 4))] * 3


def test_a_value_that_equals_the_default_reaches_a_kernel_of_a_schema_by_hand(
    namespace: str,
) -> None:
    seen: list[int] = []
    with pytest.warns(torchop.SchemaWarning, match="the schema's is used"):

        @torchop.custom_op(
            f"{namespace}::op", mutates_args=(), schema="(Tensor x, int k=3) -> Tensor"
        )
        def op(x: Tensor, k: int = 5) -> Tensor:
            seen.append(k)
            return x.clone()

    op(torch.ones(1), 3)
    op(torch.ones(1), k=3)
    op(torch.ones(1), 5)
    with torchop.native.disabled():
        op(torch.ones(1), 3)
    assert seen == [3, 3, 5, 3]
