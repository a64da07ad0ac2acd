"""Names that users choose are never executed as code. Uses private names."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import torchop
from tests._support import strategies
from torchop._schema.structure.source import is_plain

executed: list[str] = []
RUN = f"__import__('sys').modules[{__name__!r}].executed.append('a name')"
HOSTILE = (
    f"wrong_type if {RUN} else _wrong_type",
    f"x); {RUN} #",
    f"x'] or {RUN} or ['",
    f"made\n    {RUN}",
    *("Config[int]", "My Config", "K-1", "a.b", "1x", "<lambda>", "x,y", "*", "'", '"""', "\\"),
    *("class", "None", "__debug__", "__builtins__", "async", "from", "print", "type", "list"),
    *("_wrong_type", "_operator", "handle", "result", "values", "kernel", "x", "cfg", "cfg_x"),
    *("größe", "ﬁ", "fi", "ª", "", " ", "x\0y", "\ud800"),
)


class Text(str):
    """A string that claims to be an identifier, but whose `repr` and `str` return code.

    If torchop inserted the string into generated code, the code would run.
    """

    def __repr__(self) -> str:
        return RUN

    def __str__(self) -> str:
        return RUN

    def __format__(self, spec: str) -> str:
        return RUN

    def isidentifier(self) -> bool:
        return True


# The default alphabet of `st.text()`. Pass it explicitly, because Hypothesis checks its own default
# by encoding every character, which is slow.
letters = st.characters(exclude_categories=["Cs"])
names = st.one_of(st.sampled_from(HOSTILE), st.text(letters, max_size=4))
fields_of_classes = st.lists(st.one_of(names, names.map(Text)), min_size=1, max_size=3, unique=True)


class Made(NamedTuple):
    annotation: Any
    value: Any


def renamed(cls: Any, name: str) -> Any:
    # Python rejects a name that contains a NUL or a lone surrogate.
    with contextlib.suppress(ValueError, UnicodeEncodeError):
        cls.__name__ = name
    cls.__module__ = __name__
    return cls


def a_dataclass(name: str, fields: list[str], is_frozen: bool, size: Any = 3) -> Made:
    cls = dataclasses.make_dataclass("C", [("size", type(size))], frozen=is_frozen)
    return Made(renamed(cls, name), cls(size))


def a_dataclass_with_slots(name: str, fields: list[str], is_frozen: bool, size: Any = 3) -> Made:
    cls = dataclasses.make_dataclass("C", [("size", type(size))], frozen=is_frozen, slots=True)
    return Made(renamed(cls, name), cls(size))


def a_dataclass_with_an_init(name: str, fields: list[str], is_frozen: bool, size: Any = 3) -> Made:
    def init(self: Any, /, **values: Any) -> None:
        vars(self).update(values)

    cls = type("C", (), {"__annotations__": dict.fromkeys(fields, type(size)), "__init__": init})
    decorate = dataclasses.dataclass(init=False, repr=False, eq=False, frozen=is_frozen)
    cls = decorate(renamed(cls, name))
    return Made(cls, cls(**{field: copy.deepcopy(size) for field in fields}))


def a_named_tuple(name: str, fields: list[str], is_other: bool, size: Any = 3) -> Made:
    cls = NamedTuple("C", [("size", type(size))])  # type: ignore[misc]  # noqa: UP014
    return Made(renamed(cls, name), cls(size))


def an_enum(name: str, fields: list[str], is_other: bool) -> Made:
    try:
        cls: Any = enum.Enum("E", {f"{field}": number for number, field in enumerate(fields)})
        next(iter(cls))
    except (TypeError, ValueError, StopIteration):  # Enum rejects some of the generated names
        cls = enum.Enum("E", {"size": 1})
    return Made(renamed(cls, name), next(iter(cls)))


KINDS: tuple[Callable[[str, list[str], bool], Made], ...] = (
    a_dataclass,
    a_dataclass_with_slots,
    a_dataclass_with_an_init,
    a_named_tuple,
    an_enum,
)


def contents(value: Any) -> Any:
    if isinstance(value, (dict, tuple, enum.Enum)):
        return value
    if hasattr(value, "__slots__"):
        return value.size
    return vars(value)


@pytest.mark.parametrize("make", KINDS)
@strategies.stable
@given(names, names, fields_of_classes, st.booleans())
def test_names_are_no_part_of_the_source(
    namespace: str, make: Any, function: str, name: str, fields: list[str], flag: bool
) -> None:
    executed.clear()
    annotation, value = make(name, fields, flag)
    seen = []

    def kernel(x: Tensor, cfg: Any) -> Tensor:
        seen.append(cfg)
        return x * 2

    kernel.__name__ = function
    kernel.__annotations__["cfg"] = annotation
    library = torchop.Library(namespace, "FRAGMENT")
    with library, contextlib.suppress(torchop.SchemaError):  # some names are invalid in any schema
        op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), lib=library)
        assert op(torch.ones(1), value).item() == 2
        assert type(seen[0]) is type(value)
        assert contents(seen[0]) == contents(value)
        with pytest.raises(TypeError):
            op(torch.ones(1), object())
    assert executed == []


@pytest.mark.parametrize("make", KINDS[:4])
@strategies.stable
@given(names, fields_of_classes, st.booleans())
def test_names_in_results_are_no_part_of_the_source(
    namespace: str, make: Any, name: str, fields: list[str], flag: bool
) -> None:
    executed.clear()
    annotation, value = make(name, fields, flag, torch.ones(1))

    def kernel(x: Tensor) -> Any:
        return value

    kernel.__annotations__["return"] = annotation
    with torchop.Library(namespace, "FRAGMENT") as library:
        op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=(), lib=library)
        result = op(torch.ones(1))
        assert type(result) is annotation
        assert contents(result) == contents(value)
        value = object()
        with pytest.raises(torchop.ResultError):
            op(torch.ones(1))
    assert executed == []


@strategies.stable
@given(st.one_of(names, names.map(Text)))
def test_a_parameter_has_a_name_that_source_can_hold(namespace: str, name: str) -> None:
    executed.clear()

    def function(*args: Any) -> Tensor:
        return args[0] * 2  # type: ignore[no-any-return]

    kind = inspect.Parameter.POSITIONAL_ONLY
    with contextlib.suppress(ValueError, IndexError):  # an invalid name raises one of these
        parameter = inspect.Parameter(name, kind, annotation=Tensor)
        function.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [parameter], return_annotation=Tensor
        )
        with torchop.Library(namespace, "FRAGMENT") as library:
            op = torchop.custom_op(f"{namespace}::op", function, mutates_args=(), lib=library)
            assert op(torch.ones(1)).item() == 2
            assert list(inspect.signature(op).parameters) == [name]
            assert is_plain(name)
    assert executed == []


@pytest.mark.parametrize("name", ["Config[int]", "My Config", "class", "K-1", "größe"])
def test_compilers_and_messages_follow_any_name(namespace: str, name: str) -> None:
    cls, value = a_dataclass(name, [], False)

    def function(x: Tensor, cfg: Any) -> Tensor:
        return x * cfg.size

    function.__name__ = name
    function.__annotations__["cfg"] = cls
    op: Any = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    op.register_fake(lambda x, cfg: torch.empty_like(x))
    compiled = torch.compile(lambda x: op(x, value), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(1)).item() == 3
    with pytest.raises(torchop.ArgumentError) as error:
        op(torch.ones(1), 3)
    assert f"cfg: expected {name}, got int" in str(error.value)
    with pytest.raises(TypeError) as missing:
        op(torch.ones(1))
    assert f"{name}() missing 1 required positional argument: 'cfg'" in str(missing.value)
