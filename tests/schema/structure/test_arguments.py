"""Structured arguments: what the kernel gets, what the schema shows, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Optional, TypedDict, Union

import pytest
import torch
from torch import Tensor
from typing_extensions import NotRequired

import torchop
from tests.releases import needs_tags
from tests.support import needs_native
from torchop import ArgumentError, ArgumentValueError, SchemaError


class Mode(enum.Enum):
    LINEAR = 1
    CUBIC = 2


class Sides(enum.Flag):
    LEFT = 1
    RIGHT = 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    scale: float
    count: int = 3


@dataclasses.dataclass
class Plain:
    scale: float = 1.0
    names: list[str] = dataclasses.field(default_factory=list)
    inner: Frozen = Frozen(2.0)


@dataclasses.dataclass(frozen=True)
class Slotted:
    __slots__ = ("count", "scale")
    scale: float
    count: int


@dataclasses.dataclass
class Checked:
    size: int
    double: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError("size is negative")
        self.double = 2 * self.size


class More(Plain):
    pass


@dataclasses.dataclass
class OwnInit:
    size: int
    double: int = dataclasses.field(init=False)

    def __init__(self, size: int) -> None:
        self.size = size
        self.double = 2 * size


@dataclasses.dataclass
class State:
    size: int
    calls: int = dataclasses.field(default=0, init=False)


def with_calls(size: int, calls: int) -> State:
    state = State(size)
    state.calls = calls
    return state


class Point(NamedTuple):
    x: int
    y: float = 0.5


class Options(TypedDict):
    first: int
    second: NotRequired[Optional[float]]


class WithTensor(NamedTuple):
    weight: Tensor
    bias: Optional[Tensor] = None


def same(left: Any, right: Any) -> bool:
    if isinstance(right, Tensor):
        return left is right
    if isinstance(right, float):
        return type(left) is float and repr(left) == repr(right)
    if isinstance(right, dict):
        return (
            type(left) is dict
            and list(left) == list(right)
            and all(same(left[key], right[key]) for key in right)
        )
    if isinstance(right, (list, tuple)):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and bool(left == right)


@pytest.mark.parametrize(
    ("left", "right"),
    [([1], (1,)), ({"a": 1}, {"b": 1}), (1, True), (0.0, -0.0), (Point(1), (1, 0.5))],
)
def test_the_comparison_can_fail(left: Any, right: Any) -> None:
    assert same(left, left)
    assert not same(left, right)


# What is written, the arguments of the schema, and values that must arrive as they are.
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
    "TypedDict": (
        Options,
        "*, SymInt a_first, bool a_second_given=False, float? a_second=None",
        [{"first": 1}, {"first": 1, "second": 2.0}, {"first": 1, "second": None}],
    ),
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
    "Flag": (Sides, "SymInt a", [Sides.LEFT, Sides.LEFT | Sides.RIGHT]),
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
    "optional tensor fields": (
        Optional[WithTensor],
        "Tensor? a_weight=None, Tensor? a_bias=None, *, bool a_given",
        [None, WithTensor(torch.ones(1), torch.ones(2))],
    ),
}


def recorder(annotation: Any, seen: list[Any]) -> Callable[..., Tensor]:
    def function(x: Tensor, a: Any) -> Tensor:
        seen.append(a)
        return x.clone()

    function.__annotations__ = {"x": Tensor, "a": annotation, "return": Tensor}
    return function


@pytest.mark.parametrize("kind", list(TYPES))
def test_a_kernel_gets_what_the_caller_passed(namespace: str, kind: str) -> None:
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
    torch._dynamo.reset()

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


# --------------------------------------------------------------------------------------------------
# Defaults


def test_defaults_are_those_of_the_function(namespace: str) -> None:
    seen: list[Any] = []

    def function(
        x: Tensor,
        inner: Frozen = Frozen(9.0),
        names: list[str] = ["a"],  # noqa: B006  (what is tested)
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
    op.overload(torch.ones(1))  # those of the schema
    assert [same(found, expected) for found in seen] == [True, True]
    # A kernel may write into its list; the next call gets one of its own.
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

    @op.register_kernel("cpu")
    def _(x: Tensor, inner: Frozen, sizes: tuple[int, int] = (8, 8)) -> Tensor:
        seen.append((inner.count, sizes))
        return x.clone()

    op(torch.ones(1), Frozen(1.0, 3), (3, 4))  # both are what the schema has
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


# --------------------------------------------------------------------------------------------------
# Values that are refused


@dataclasses.dataclass
class Everything:
    weight: Any = None
    scale: Any = 1.0
    scales: Any = dataclasses.field(default_factory=lambda: [1.0])
    mode: Any = Mode.LINEAR
    kind: Any = "up"
    box: Any = (1, 2)
    point: Any = Point(1)  # noqa: RUF009  (nobody can change it)
    table: Any = dataclasses.field(default_factory=lambda: {"a": 1.0})
    rows: Any = dataclasses.field(default_factory=lambda: [[1]])
    options: Any = dataclasses.field(default_factory=lambda: {"first": 1})


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
    "options": Options,
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
        ArgumentValueError,
        r"cfg\.kind: expected one of 'up', 'down', got 'left'",
    ),
    "length": ({"box": (1, 2, 3)}, ArgumentValueError, r"cfg\.box: expected 2 items, got 3"),
    "structure": ({"point": (1, 2.0)}, ArgumentError, r"cfg\.point: expected Point, got tuple"),
    "inside": ({"point": Point("1")}, ArgumentError, r"cfg\.point\.x: expected int, got str"),  # type: ignore[arg-type]
    "entry": ({"table": {"b": "c"}}, ArgumentError, r"cfg\.table\['b'\]: expected float, got str"),
    "key": ({"table": {1: 1.0}}, ArgumentError, r"cfg\.table: the key 1: expected str, got int"),
    "row": (
        {"rows": [[1], [2, "3"]]},
        ArgumentError,
        r"cfg\.rows\[1\]\[1\]: expected int, got str",
    ),
    "missing key": ({"options": {}}, ArgumentError, r"cfg\.options: expected the key 'first'"),
    "unknown key": (
        {"options": {"first": 1, "third": 2}},
        ArgumentError,
        r"cfg\.options: got the key 'third'.*it has first, second",
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


def test_a_subclass_would_come_out_as_its_base_and_is_refused(namespace: str) -> None:
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
        ({"cfg_mode": "QUICK"}, ArgumentValueError, r"'cfg_mode' \(cfg.mode\): expected one of"),
        (
            {"cfg_kind": "left"},
            ArgumentValueError,
            r"'cfg_kind' \(cfg.kind\): expected one of 'up'",
        ),
        ({"cfg_box": [1]}, ArgumentValueError, r"'cfg_box' \(cfg.box\): expected 2 items, got 1"),
        ({"cfg_table_keys": []}, ArgumentValueError, r"cfg.table: got 0 keys for 1 values"),
        ({"cfg_rows_lengths": [3]}, ArgumentValueError, r"cfg.rows: the lengths \[3\] do not add"),
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


def test_an_object_of_a_class_that_pytorch_passes_on_is_checked(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, generator: torch.Generator) -> Tensor:
        return torch.rand(2, generator=generator)

    assert re.search(r"Tensor x, (torch\._C\.)?Generator generator", op._schema)
    op(torch.ones(1), torch.Generator())
    # Before 2.13 the schema language has a type for it, and PyTorch checks it.
    message = r"generator: expected torch.*Generator, got int|'Generator'.*found type 'int'"
    with pytest.raises(ArgumentError, match=message):
        op(torch.ones(1), 3)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# Signatures that are refused


@dataclasses.dataclass
class Recursive:
    inner: Optional[Recursive] = None


@dataclasses.dataclass
class WithGiven:
    given: bool


@dataclasses.dataclass
class OtherInit:
    size: int

    def __init__(self, half: int) -> None:
        self.size = 2 * half


@dataclasses.dataclass
class WithInitVar:
    size: dataclasses.InitVar[int]


Many = dataclasses.make_dataclass("Many", [(f"field_{index}", int) for index in range(64)])


def too_many(x: Tensor, cfg: Many) -> Tensor: ...  # type: ignore[valid-type]
def collides(x: Tensor, cfg: Frozen, cfg_scale: float) -> Tensor: ...
def recursive(x: Tensor, cfg: Recursive) -> Tensor: ...
def flag_collides(x: Tensor, cfg: Optional[WithGiven]) -> Tensor: ...
def other_init(x: Tensor, cfg: OtherInit) -> Tensor: ...
def init_var(x: Tensor, cfg: WithInitVar) -> Tensor: ...
def heterogeneous(x: Tensor, cfg: tuple[int, float]) -> Tensor: ...
def several(x: Tensor, cfg: list[Frozen]) -> Tensor: ...
def optional_items(x: Tensor, cfg: list[Optional[int]]) -> Tensor: ...
def function_argument(x: Tensor, cfg: Frozen, f: Callable[[int], int]) -> Tensor: ...
def mixed_literal(x: Tensor, cfg: Literal["a", 1]) -> Tensor: ...
def bad_default(x: Tensor, cfg: Frozen = 3) -> Tensor: ...  # type: ignore[assignment]
def none_default(x: Tensor, cfg: Frozen = None) -> Tensor: ...  # type: ignore[assignment]
def wrong_return(x: Tensor, cfg: Frozen) -> object: ...


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "many fields": (too_many, "the schema has 65 arguments, of which PyTorch takes at most 64"),
    "collision": (collides, r"'cfg.scale' and 'cfg_scale' would both be the argument 'cfg_scale'"),
    "collision with a flag": (
        flag_collides,
        "'cfg' and 'cfg.given' would both be the argument 'cfg_given'",
    ),
    "recursion": (recursive, r"cfg.inner is a .*Recursive inside a .*Recursive"),
    "__init__": (other_init, r"its __init__ does not take its fields \(size\) by name"),
    "InitVar": (init_var, "its InitVar 'size' is not kept"),
    "heterogeneous": (
        heterogeneous,
        r"type tuple\[int, float\]; the nearest supported type is: a NamedTuple\.",
    ),
    "several": (several, r"type list\[.*Frozen\]; the .* type is: a dataclass of lists\."),
    "optional items": (optional_items, "unsupported type"),
    "function": (function_argument, r"parameter 'f' has unsupported type Callable"),
    "Literal": (mixed_literal, "unsupported type"),
    "default": (bad_default, "cfg has a default of type int; expected .*Frozen"),
    "None": (none_default, r"cfg defaults to None; annotate it as Optional\["),
    "return": (wrong_return, "return has unsupported type object"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_signature_is_refused_with_its_place_and_defines_nothing(
    namespace: str, what: str
) -> None:
    function, message = REFUSED[what]
    with pytest.raises(SchemaError, match=message) as caught:
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert len(str(caught.value)) < 400
    assert not hasattr(getattr(torch.ops, namespace), "op")


def test_tensors_of_a_structure_by_keyword_only_are_refused(namespace: str) -> None:
    def function(x: Tensor, *, cfg: WithTensor) -> Tensor: ...

    with pytest.raises(NotImplementedError, match=r"kwarg-only Tensor args \(cfg.*Move it before"):
        torchop.custom_op(f"{namespace}::op", function, mutates_args=())


def test_infer_schema_says_what_a_schema_alone_can(namespace: str) -> None:
    def function(x: Tensor, cfg: Frozen) -> Tensor: ...

    with pytest.raises(SchemaError, match=r"unsupported type .*Frozen.*one argument per field"):
        torchop.infer_schema(function, mutates_args=())


# --------------------------------------------------------------------------------------------------
# The handle


def test_positional_only_parameters_stay_positional(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int, /, handle: int = 2) -> Tensor:
        return x * n * handle

    assert op(torch.ones(1), 3, handle=5).item() == 15
    with pytest.raises(TypeError, match="positional-only"):
        op(torch.ones(1), n=3)  # type: ignore[call-arg]


def test_a_handle_is_what_every_handle_is(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: Frozen) -> Tensor:
        """What it does."""
        return x * cfg.scale

    assert isinstance(op, torchop.CustomOp)
    assert op.__doc__ == "What it does."
    assert list(torch._library.custom_ops.inspect.signature(op).parameters) == ["x", "cfg"]
    assert repr(op).startswith(f"<torchop.CustomOp {namespace}::op(Tensor x, *, float cfg_scale")
    assert copy.deepcopy(op) is op
    assert pickle.loads(pickle.dumps(op)) is op
    assert "cfg_scale = cfg.scale" in op.source  # type: ignore[attr-defined]
    torchop.opcheck(op, (torch.ones(2), Frozen(2.0)), test_utils="test_schema")
    assert torchop.explain(op, torch.ones(2), Frozen(2.0)).native in (True, False)
    with pytest.raises(SchemaError, match="takes or returns structures"):
        op.derive_inplace()


@needs_native
def test_calls_are_native(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: Frozen, kind: Literal["a", "b"] = "a") -> Tensor:
        return x * cfg.scale

    for _ in range(3):  # the first has the call plan compiled
        op(torch.ones(2), Frozen(2.0))
    assert torchop.native.counters(op) == {"native": 2}
    assert torchop.explain(op, torch.ones(2), Frozen(2.0)).native


def test_a_tensor_in_a_structure_can_be_mutated(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=("cfg.weight",))
    def op(x: Tensor, cfg: WithTensor) -> None:
        cfg.weight.add_(x)

    assert "Tensor(a1!) cfg_weight, Tensor? cfg_bias=None" in op._schema
    weight = torch.zeros(2)
    op(torch.ones(2), WithTensor(weight))
    torch._dynamo.reset()
    torch.compile(op, fullgraph=True, backend="aot_eager")(torch.ones(2), WithTensor(weight))
    assert weight.tolist() == [2, 2]
    with pytest.raises(
        SchemaError, match=r"names 'cfg\.scale'.*tensors are x, cfg\.weight, cfg\.bias"
    ):
        torchop.custom_op(f"{namespace}::other", op.__wrapped__, mutates_args=("cfg.scale",))


def test_parameters_may_be_called_like_builtins(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(
        x: Tensor,
        type: Literal["a", "b"],
        list: tuple[int, ...] = (1,),
        dict: Options = {"first": 1},  # noqa: B006  (nobody changes it)
        tuple: Optional[Frozen] = None,
        result: Frozen = Frozen(1.0),
        names: list[str] = ["n"],  # type: ignore[valid-type]  # noqa: B006
    ) -> tuple[Tensor, ...]:  # type: ignore[valid-type]
        return x * list[0], x * dict["first"]

    first, second = op(torch.ones(1), "a")
    assert (first.item(), second.item()) == (1, 1)
    with pytest.raises(ArgumentValueError, match="type: expected one of 'a', 'b', got 'c'"):
        op(torch.ones(1), "c")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["_operator", "_check_float", "_Frozen", "type"])
def test_a_function_may_be_called_like_what_its_call_uses(namespace: str, name: str) -> None:
    def function(x: Tensor, cfg: Frozen) -> Tensor:
        return x * cfg.scale

    function.__name__ = name
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert op(torch.ones(1), Frozen(2)).item() == 2


class MayHold(TypedDict, total=False):
    inner: Optional[Frozen]


@pytest.mark.parametrize("value", [{}, {"inner": None}, {"inner": Frozen(2.0)}])
def test_a_key_that_may_be_missing_holds_a_structure_that_may_be_none(
    namespace: str, value: MayHold
) -> None:
    seen = []

    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: MayHold) -> Tensor:
        seen.append(cfg)
        return x.clone()

    op(torch.ones(1), value)
    assert seen == [value]


def test_an_error_is_told_by_a_tracer_too(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: Frozen) -> Tensor:
        return x.clone()

    compiled = torch.compile(lambda x: op(x, Frozen("2")), fullgraph=True, backend="eager")  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"::op: cfg\.scale: expected float, got str"):
        compiled(torch.ones(1))


def test_a_graph_of_an_operator_that_was_replaced_does_not_call_the_new_one(
    namespace: str,
) -> None:
    def define(factor: int) -> Any:
        @torchop.custom_op(f"{namespace}::op", mutates_args=())
        def op(x: Tensor, cfg: Frozen) -> Tensor:
            return x * factor

        op.register_fake(lambda x, cfg: torch.empty_like(x))
        return op

    old = define(2)
    compiled = torch.compile(lambda x: old(x, Frozen(1.0)), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(1)).item() == 2
    new = define(3)
    with pytest.raises(Exception, match="It was replaced by the definition"):
        compiled(torch.ones(1))
    with pytest.raises(torchop.OperatorGoneError, match="It was replaced by the definition"):
        old(torch.ones(1), Frozen(1.0))
    assert new(torch.ones(1), Frozen(1.0)).item() == 3


def test_an_init_that_is_of_no_file_runs(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without one of its own, its module would be builtins, into which dataclasses would write.
    module = types.ModuleType("of_no_file")
    monkeypatch.setitem(sys.modules, "of_no_file", module)
    defined = vars(module)
    defined["dataclasses"] = dataclasses
    source = """
@dataclasses.dataclass
class Doubled:
    size: int

    def __init__(self, size):
        self.size = size
        self.double = 2 * size
"""
    exec(source, defined)
    Doubled = defined["Doubled"]

    def function(x: Tensor, cfg: Any) -> Tensor:
        return x * cfg.double

    function.__annotations__["cfg"] = Doubled
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert op(torch.ones(1), Doubled(2)).item() == 4


@needs_tags
def test_in_place_and_out_operators_take_structures(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op_", mutates_args=("x",), tags=torch.Tag.inplace)
    def op_(x: Tensor, cfg: Frozen) -> Tensor:
        return x.mul_(cfg.scale)

    @torchop.custom_op(f"{namespace}::op.out", mutates_args=("low", "out"), tags=torch.Tag.out)
    def op_out(
        cfg: WithTensor, x: Tensor, *, mode: Mode = Mode.CUBIC, low: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.mul(x, cfg.weight, out=low), torch.add(x, cfg.weight, out=out)

    x, low, out = torch.ones(1), torch.empty(1), torch.empty(1)
    assert op_(x, Frozen(3.0)) is x
    assert x.item() == 3
    first, second = op_out(WithTensor(torch.ones(1)), x, low=low, out=out)
    assert first is low
    assert second is out
    assert (low.item(), out.item()) == (3, 4)
    torch._dynamo.reset()
    compiled = torch.compile(op_, fullgraph=True, backend="aot_eager")
    compiled(x, Frozen(2.0))
    assert x.item() == 6


def test_structures_do_not_mix_between_threads(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: Frozen) -> tuple[Tensor, str]:
        return x * cfg.scale, str(cfg.count)

    wrong: list[Any] = []

    def work(number: int) -> None:
        for _ in range(200):
            result, text = op(torch.ones(1), Frozen(float(number), number))
            if result.item() != number or text != str(number):
                wrong.append((number, result, text))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
