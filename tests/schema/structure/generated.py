"""Hypothesis strategies for annotations that are nested classes, and for their values."""

from __future__ import annotations

import dataclasses
import enum
import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Optional, Union

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor


class Mode(enum.Enum):
    LINEAR = "linear"
    CUBIC = "cubic"


class Structured(NamedTuple):
    """An annotation, a strategy for its values, and whether they contain tensors."""

    annotation: Any
    values: SearchStrategy[Any]
    holds_tensors: bool = False


_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
_floats = st.floats(allow_nan=False)
_small = st.integers(-(2**40), 2**40)
_tensors = st.integers(0, 3).map(lambda size: torch.ones(size))

LEAVES = (
    Structured(int, _small),
    Structured(float, _floats),
    Structured(bool, st.booleans()),
    Structured(str, _text),
    Structured(torch.dtype, st.sampled_from([torch.float32, torch.int8])),
    Structured(Mode, st.sampled_from(Mode)),
    Structured(Literal["up", "down"], st.sampled_from(["up", "down"])),
    Structured(Union[int, float], st.one_of(_small, _floats)),
    Structured(list[int], st.lists(_small, max_size=3)),
    Structured(list[str], st.lists(_text, max_size=3)),
    Structured(tuple[int, int], st.tuples(_small, _small)),
    Structured(tuple[float, ...], st.lists(_floats, max_size=3).map(tuple)),
    Structured(Optional[float], st.one_of(st.none(), _floats)),
    Structured(Optional[list[str]], st.one_of(st.none(), st.lists(_text, max_size=2))),
    Structured(dict[str, float], st.dictionaries(_text, _floats, max_size=2)),
    Structured(list[list[int]], st.lists(st.lists(_small, max_size=2), max_size=3)),
    Structured(torch.Size, st.lists(st.integers(0, 9), max_size=3).map(torch.Size)),
    Structured(Tensor, _tensors, holds_tensors=True),
    Structured(Optional[Tensor], st.one_of(st.none(), _tensors), holds_tensors=True),
    Structured(dict[str, Tensor], st.dictionaries(_text, _tensors, max_size=2), holds_tensors=True),
    Structured(
        Optional[list[Tensor]],
        st.one_of(st.none(), st.lists(_tensors, max_size=2)),
        holds_tensors=True,
    ),
)
# Fields of structures in lists
ITEMS = (LEAVES[0], LEAVES[1], LEAVES[2], LEAVES[3], LEAVES[4], LEAVES[5], *LEAVES[17:19])
# Fields of results
RESULTS = (
    *LEAVES,
    Structured(Optional[int], st.one_of(st.none(), _small)),
    Structured(Optional[str], st.one_of(st.none(), _text)),
    Structured(torch.device, st.just(torch.device("cpu"))),
    Structured(
        list[Optional[Tensor]],
        st.lists(st.one_of(st.none(), _tensors), max_size=3),
        holds_tensors=True,
    ),
    Structured(
        Optional[dict[str, Tensor]],
        st.one_of(st.none(), st.dictionaries(_text, _tensors, max_size=2)),
        holds_tensors=True,
    ),
)


def _list(item: Structured) -> Structured:
    values = st.lists(item.values, max_size=2)
    return Structured(list[item.annotation], values, item.holds_tensors)


def _tuple(item: Structured) -> Structured:
    values = st.lists(item.values, max_size=2).map(tuple)
    return Structured(tuple[item.annotation, ...], values, item.holds_tensors)


def _list_with_none(item: Structured) -> Structured:
    values = st.lists(st.one_of(st.none(), item.values), max_size=2)
    return Structured(list[Optional[item.annotation]], values, item.holds_tensors)


def _dict(item: Structured) -> Structured:
    values = st.dictionaries(_text, item.values, max_size=2)
    return Structured(dict[str, item.annotation], values, item.holds_tensors)


LISTS = (_list, _tuple, _list_with_none, _dict)
_numbers = itertools.count()


def _made(kind: str, fields: Mapping[str, Any]) -> Any:
    name = f"Generated{next(_numbers)}"
    cls: Any
    if kind in ("dataclass", "frozen"):
        cls = dataclasses.make_dataclass(name, fields.items(), frozen=kind == "frozen")
    elif kind == "slots":
        cls = dataclasses.make_dataclass(name, fields.items(), slots=True)
    else:
        cls = NamedTuple(name, list(fields.items()))  # type: ignore[misc]  # fields are not literals
    # Add the class to this module, because pickle looks the class up by its module and name.
    cls.__module__ = __name__
    setattr(sys.modules[__name__], name, cls)
    return cls


@st.composite
def structures(draw: DrawFn, depth: int = 2, leaves: Sequence[Structured] = LEAVES) -> Structured:
    """Generate a class whose fields may be optional, and may be classes with fields themselves."""
    kind = draw(st.sampled_from(["dataclass", "frozen", "slots", "NamedTuple"]))
    fields: dict[str, Structured] = {}
    for index in range(draw(st.integers(1, 4))):
        if depth and draw(st.booleans()):
            is_list, is_result = draw(st.booleans()), leaves is RESULTS
            is_row = is_list and not is_result
            field = draw(structures(0, ITEMS) if is_row else structures(depth - 1, leaves))
            if is_list:
                field = draw(st.sampled_from(LISTS if is_result else LISTS[:1]))(field)
            if draw(st.booleans()):
                values = st.one_of(st.none(), field.values)
                field = Structured(Optional[field.annotation], values, field.holds_tensors)
        else:
            field = draw(st.sampled_from(leaves))
        fields[f"f{index}"] = field
    cls = _made(kind, {name: field.annotation for name, field in fields.items()})
    values = st.builds(cls, **{name: field.values for name, field in fields.items()})
    return Structured(cls, values, any(field.holds_tensors for field in fields.values()))


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal, and have the same types at every level."""
    if type(left) is not type(right) and not isinstance(right, Tensor):
        return False
    if dataclasses.is_dataclass(right):
        names = [field.name for field in dataclasses.fields(right)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(right, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in right)
    if isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(right, Tensor):
        return isinstance(left, Tensor) and torch.equal(left, right)
    return repr(left) == repr(right)
