"""Which annotations a schema can express, and what is suggested for the others."""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import typing
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import pytest
import torch
from torch import Tensor
from torch._library.infer_schema import SUPPORTED_PARAM_TYPES, SUPPORTED_RETURN_TYPES
from torch.types import Number

from tests._support import strategies
from tests._support.releases import ENUM, GENERATOR, needs_enums
from torchop._schema import advice, kinds, types


class Mode(enum.IntEnum):
    SUM = 1


@dataclasses.dataclass
class Box:
    left: int


class Pair(typing.NamedTuple):
    left: int
    right: int


class Options(typing.TypedDict):
    left: int


Seconds = typing.NewType("Seconds", float)


# --------------------------------------------------------------------------------------------------
# Arguments

EXPECTED: dict[str, tuple[Any, dict[str, str]]] = {
    # by the name of the type: the type, and the schema type of each container that it may stand in
    "Tensor": (
        Tensor,
        {"": "Tensor", "optional": "Tensor?", "list": "Tensor[]", "list of optional": "Tensor?[]"}
        | {"optional list": "Tensor[]?", "optional list of optional": "Tensor?[]?"},
    ),
    "int": (
        int,
        {"": "SymInt", "optional": "SymInt?", "list": "SymInt[]", "optional list": "SymInt[]?"},
    ),
    "float": (
        float,
        {"": "float", "optional": "float?", "list": "float[]", "optional list": "float[]?"},
    ),
    "bool": (
        bool,
        {"": "bool", "optional": "bool?", "list": "bool[]", "optional list": "bool[]?"},
    ),
    "Number": (Number, {"": "Scalar", "optional": "Scalar?", "list": "Scalar[]"}),
    "str": (str, {"": "str", "optional": "str?"}),
    "dtype": (torch.dtype, {"": "ScalarType", "optional": "ScalarType?"}),
    "device": (torch.device, {"": "Device", "optional": "Device?"}),
    "Generator": (torch.Generator, {"": GENERATOR}),
    "Enum": (Mode, ENUM),
}
SEQUENCES = (list, List, Sequence, collections.abc.Sequence)


def spellings(kind: Any, container: str) -> list[Any]:
    """The ways to write a container of `kind`."""
    if container == "":
        return [kind]
    if container == "optional":
        return [Optional[kind], Union[None, kind], kind | None, None | kind]
    if container == "list":
        return [sequence[kind] for sequence in SEQUENCES]
    if container == "list of optional":
        items = spellings(kind, "optional")
    else:
        lists = spellings(kind, container.removeprefix("optional "))
        return [spelling for each in lists for spelling in (Optional[each], each | None)]
    return [sequence[item] for sequence in SEQUENCES for item in items]


CONTAINERS = (
    *("", "optional", "list", "list of optional", "optional list"),
    "optional list of optional",
)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("name", EXPECTED)
def test_a_type_stands_in_exactly_these_containers(name: str, container: str) -> None:
    kind, expected = EXPECTED[name]
    found = {kinds.argument_type(spelling) for spelling in spellings(kind, container)}
    assert found == {expected.get(container)}


@pytest.mark.parametrize("number", [Number, int | float | bool, Union[bool, int, float]])
def test_a_number_is_the_union_of_its_three_types(number: Any) -> None:
    assert kinds.argument_type(number) == "Scalar"
    assert kinds.argument_type(number | None) == "Scalar?"


@pytest.mark.parametrize("annotation", SUPPORTED_PARAM_TYPES, ids=str)
def test_every_type_of_pytorchs_own_inference_is_supported(annotation: Any) -> None:
    assert kinds.argument_type(annotation) == SUPPORTED_PARAM_TYPES[annotation]


def test_a_process_group_name_is_a_string() -> None:
    from torch.distributed.distributed_c10d import GroupName

    assert kinds.argument_type(GroupName) == "str"
    assert kinds.argument_type(Optional[GroupName]) == "str?"


@pytest.mark.parametrize("annotation", strategies.UNSUPPORTED_TYPES)
def test_an_unsupported_type_has_no_schema(annotation: str) -> None:
    function = strategies.make_function(f"def f(x: {annotation}): ...")
    assert kinds.argument_type(function.__annotations__["x"]) is None


# --------------------------------------------------------------------------------------------------
# Results


@pytest.mark.parametrize(
    ("annotation", "schema"),
    [
        (None, "()"),
        (type(None), "()"),
        (Tensor, "Tensor"),
        (list[Tensor], "Tensor[]"),
        (List[Tensor], "Tensor[]"),
        (int, "SymInt"),
        (float, "float"),
        (bool, "bool"),
        (Number, "Scalar"),
        (tuple[()], "()"),
        (tuple[Tensor], "((Tensor))"),
        (Tuple[Tensor, int], "(Tensor, SymInt)"),
        (tuple[list[Tensor], Number, bool], "(Tensor[], Scalar, bool)"),
    ],
    ids=str,
)
def test_a_supported_result(annotation: Any, schema: str) -> None:
    assert kinds.return_type(annotation) == schema


@pytest.mark.parametrize("annotation", SUPPORTED_RETURN_TYPES, ids=str)
def test_every_result_of_pytorchs_own_inference_is_supported(annotation: Any) -> None:
    assert kinds.return_type(annotation) == SUPPORTED_RETURN_TYPES[annotation]


@pytest.mark.parametrize("annotation", strategies.UNSUPPORTED_RETURNS)
def test_an_unsupported_result_has_no_schema(annotation: str) -> None:
    function = strategies.make_function(f"def f() -> {annotation}: ...")
    assert kinds.return_type(function.__annotations__["return"]) is None


@pytest.mark.parametrize("inner", ["Optional[Tensor]", "str", "tuple[Tensor, Tensor]", "None"])
def test_a_tuple_with_an_unsupported_item_has_no_schema(inner: str) -> None:
    function = strategies.make_function(f"def f() -> tuple[Tensor, {inner}]: ...")
    assert kinds.return_type(function.__annotations__["return"]) is None


# --------------------------------------------------------------------------------------------------
# In messages

FIELDS = "one argument per field"


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (None, "None"),
        (Tensor, "torch.Tensor"),
        (torch.Generator, "torch.Generator"),
        (Mode, f"{__name__}.Mode"),
        (Optional[Tensor], "Optional[torch.Tensor]"),
        (Dict[str, int], "Dict[str, int]"),
        (collections.abc.Sequence[int], "Sequence[int]"),
        (typing.Any, "Any"),
        (tuple[int, int], "tuple[int, int]"),
    ],
    ids=str,
)
def test_an_annotation_is_spelled_as_its_author_wrote_it(annotation: Any, text: str) -> None:
    assert types.spell(annotation) == text


def test_a_long_annotation_is_cut() -> None:
    text = types.spell(typing.Literal["a" * 100])
    assert text.startswith("Literal['aaaa")
    assert text.endswith("...")
    assert len(text) == 60


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (Box, FIELDS),
        (Pair, FIELDS),
        (Options, FIELDS),
        (Seconds, "float"),
        (Optional[Seconds], "Optional[float]"),
        pytest.param(Optional[Mode], f"{__name__}.Mode", marks=needs_enums),
        pytest.param(list[Mode], f"{__name__}.Mode", marks=needs_enums),
        pytest.param(typing.Literal[Mode.SUM], f"{__name__}.Mode", marks=needs_enums),
        (typing.Literal["a", None], "str"),
        (typing.Literal["a", 1], advice.SUPPORTED),
    ],
    ids=str,
)
def test_the_nearest_type_looks_into_classes_and_aliases(annotation: Any, text: str) -> None:
    assert advice.nearest(annotation) == text


@pytest.mark.parametrize(
    "suggestion",
    sorted({near for near in strategies.UNSUPPORTED_TYPES.values() if "," not in near} - {FIELDS}),
)
def test_what_is_suggested_can_be_written_instead(suggestion: str) -> None:
    function = strategies.make_function(f"def f(x: {suggestion}): ...")
    assert kinds.argument_type(function.__annotations__["x"]) is not None
