"""A handwritten schema must agree with the function. Uses private names."""

from __future__ import annotations

import functools
import linecache
import warnings
from collections.abc import Callable
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.common import is_defined
from torchop import SchemaError, SchemaWarning
from torchop._schema import compare
from torchop.extend import Schema


def parse(schema: str) -> Schema:
    return Schema(torch._C.parse_schema(f"ns::f{schema}"))


def check(schema: str, function: Callable[..., Any]) -> None:
    compare.check_function(parse(schema), function)


def scale(x: Tensor, factor: float, n: int = 1) -> Tensor: ...
def unannotated(x, factor, n=1): ...
def keyword(x: Tensor, *, n: int, mode: str = "sum") -> Tensor: ...
def keyword_in_another_order(x: Tensor, *, mode: str = "sum", n: int) -> Tensor: ...
def optional(x: Optional[Tensor], box: list[int] | None = None) -> list[Tensor]: ...
def implicit_optional(x: Tensor, n: int = None) -> None: ...  # noqa: RUF013  (as in PEP 484)
def several(x: Tensor) -> tuple[Tensor, int]: ...
def not_inferable(x: Any, layout: torch.layout, sizes: tuple[int, int]) -> dict[str, Tensor]: ...
def unresolvable(x: "Tensr", n: int) -> Tensor: ...  # noqa: F821, UP037
def variadic(*args: Any, **kwargs: Any) -> Tensor: ...
def positional_only(x: Tensor, n: int, /) -> Tensor: ...
def number(x: Tensor, n: torch.types.Number) -> Tensor: ...


@pytest.mark.parametrize(
    ("schema", "function"),
    [
        ("(Tensor x, float factor, SymInt n=1) -> Tensor", scale),
        ("(Tensor x, float factor, int n=1) -> Tensor", scale),
        ("(Tensor x, float factor=2.0, int n=1) -> Tensor", scale),
        ("(Tensor(a!) x, float factor, int n=1) -> Tensor(a!)", scale),
        ("(Tensor x, float factor, int n=1) -> Tensor result", scale),
        ("(str x, Tensor? factor, int n=1) -> int[]", unannotated),
        ("(Tensor x, *, int n, str mode='sum') -> Tensor", keyword),
        ("(Tensor x, *, int n, str mode='sum') -> Tensor", keyword_in_another_order),
        ("(Tensor? x, int[]? box=None) -> Tensor[]", optional),
        ("(Tensor x, SymInt? n=None) -> ()", implicit_optional),
        ("(Tensor x) -> (Tensor values, SymInt count)", several),
        ("(Dict(str, Tensor) x, Layout layout, int[2] sizes) -> Any", not_inferable),
        ("(Tensor x, Scalar n) -> Tensor", number),
        ("(Tensor x, Tensor y, *, int n) -> Tensor", variadic),
        ("(Tensor x, str n) -> Tensor", unresolvable),
        ("(Tensor y, int m) -> Tensor", positional_only),
        ("(Tensor[] x) -> int", len),
        # The function may have more parameters than the schema if they have defaults.
        ("(Tensor x, float factor) -> Tensor", scale),
        ("(Tensor x, *, int n) -> Tensor", keyword),
        ("(Tensor x, *, int n=1) -> Tensor", functools.partial(unannotated, factor=2.0)),
        ("(Tensor x) -> Tensor", functools.partial(unannotated, factor=2.0)),
        # In the function, a keyword-only argument of the schema may have any position.
        ("(Tensor x, *, int n=1, float factor) -> Tensor", scale),
        # The function may return a list, although the schema has two separate results.
        ("(Tensor? x, int[]? box=None) -> (Tensor, Tensor)", optional),
        ("(Tensor x, Tensor y) -> Tensor", torch.add),
    ],
)
def test_agreeing_schemas_are_accepted(schema: str, function: Callable[..., Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check(schema, function)


@pytest.mark.parametrize(
    ("schema", "function", "words"),
    [
        # The function has more or fewer parameters than the schema.
        ("(Tensor x) -> Tensor", scale, ["takes 1 positional", "the function 3", "a default"]),
        ("(Tensor x) -> Tensor", keyword, ["0 keyword-only", "the function 1 positional and 2"]),
        ("(Tensor x, str y, int n=1, int k=1) -> Tensor", unannotated, ["takes 4 positional"]),
        (
            "(Tensor x, int n, str mode='sum') -> Tensor",
            keyword,
            ["3 positional and 0"],
        ),
        ("() -> Tensor", scale, ["takes 0 positional"]),
        # Keyword-only parameters are matched by name, so a different name is an error.
        (
            "(Tensor x, *, int n, str how='sum') -> Tensor",
            keyword,
            ["no parameter 'how'", "by keyword only"],
        ),
        ("(Tensor x, *, int n) -> Tensor", positional_only, ["no parameter 'n'"]),
        ("(Tensor x, *, int x_) -> Tensor", unannotated, ["no parameter 'x_'"]),
        ("(Tensor x, str factor, int n=1) -> Tensor", scale, ["factor' is str", "says float"]),
        ("(Tensor[] x, float factor, int n=1) -> Tensor", scale, ["'x' is List[Tensor]"]),
        (
            "(Tensor x, int[]? factor, int n=1) -> Tensor",
            scale,
            ["'factor' is Optional[List[int]]"],
        ),
        ("(Tensor x, *, int n, Device mode='cpu') -> Tensor", keyword, ["'mode' is Device"]),
        ("(Tensor x, float factor, int n=1) -> ()", scale, ["returns nothing", "says (Tensor)"]),
        ("(Tensor x, float factor, int n=1) -> int", scale, ["returns (int)", "says (Tensor)"]),
        ("(Tensor x) -> (Tensor, Tensor)", several, ["(Tensor, Tensor)", "says (Tensor, int)"]),
        (
            "(Tensor? x, int[]? box=None) -> (Tensor, int)",
            optional,
            ["(Tensor, int)", "says (List[Tensor])"],
        ),
        ("(Tensor x) -> Tensor", several, ["returns (Tensor)", "says (Tensor, int)"]),
        ("(Tensor x, int? n=None) -> Tensor", implicit_optional, ["says nothing"]),
    ],
)
def test_contradicting_schema_is_rejected_and_the_error_shows_both(
    schema: str, function: Callable[..., Any], words: list[str]
) -> None:
    with pytest.raises(SchemaError, match=r"^ns::f: ") as caught:
        check(schema, function)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert (
        f"schema {Schema(torch._C.parse_schema(f'ns::f{schema}'))}, function {__name__}." in message
    )


@pytest.mark.parametrize(
    ("schema", "function", "words"),
    [
        ("(Tensor y, float factor, int n=1) -> Tensor", scale, ["'y'", "'x'", "schema's name"]),
        ("(Tensor x, float factor, int n=2) -> Tensor", scale, ["'n'", "default 1", "2 in the"]),
        ("(Tensor x, float factor, int n) -> Tensor", scale, ["'n'", "default 1", "none in the"]),
        ("(Tensor x, float factor, int m=1) -> Tensor", unannotated, ["'m'", "'n'"]),
        ("(Tensor x, *, int n, str mode='max') -> Tensor", keyword, ["'sum'", "'max'"]),
        # These types only cause a warning, because the kernel may accept other numbers or None than
        # its annotations say.
        ("(Tensor x, int factor, int n=1) -> Tensor", scale, ["factor' is int", "says float"]),
        ("(Tensor x, Scalar factor, int n=1) -> Tensor", scale, ["'factor' is number"]),
        ("(Tensor x, float n) -> Tensor", number, ["'n' is float", "says number"]),
        ("(Tensor? x, float factor, int n=1) -> Tensor", scale, ["'x' is Optional[Tensor]"]),
        ("(Tensor x, int[]? box=None) -> Tensor[]", optional, ["'x' is Tensor", "Optional"]),
        ("(Tensor x) -> (Tensor, float)", several, ["(Tensor, float)", "says (Tensor, int)"]),
        ("(Tensor x, float? factor, int n=1) -> Tensor", scale, ["'factor' is Optional[float]"]),
        ("(Tensor x, int n=3) -> ()", lambda x, n="three": None, ["'three'", "3 in the schema"]),
    ],
)
def test_allowed_difference_warns(
    schema: str, function: Callable[..., Any], words: list[str]
) -> None:
    with pytest.warns(SchemaWarning, match=r"^ns::f: ") as caught:
        check(schema, function)
    (message,) = (str(warning.message) for warning in caught)
    assert [word for word in words if word not in message] == []


def test_every_difference_is_a_warning_of_its_own() -> None:
    with pytest.warns(SchemaWarning) as caught:
        check("(Tensor y, float f=1.0, int n=2) -> Tensor", scale)
    assert len(caught) == 3


def test_parameters_that_the_schema_does_not_have_keep_their_defaults(namespace: str) -> None:
    def halve(x: Tensor, by: float = 2.0, *, bias: Tensor | None = None, to: str = "up") -> Tensor:
        return x / by if bias is None and to == "up" else x.new_zeros(())

    schema = "(Tensor x) -> Tensor"
    op: Any = torchop.custom_op(f"{namespace}::halve", halve, mutates_args=(), schema=schema)
    op.register_fake(torch.empty_like)
    op.register_flop_formula(lambda x, *, out_shape: 7)
    op.register_inverse(lambda out: out * 2)
    op.register_examples(lambda: [(torch.ones(3),), {"x": torch.ones(())}])
    for _ in range(3):  # the first call uses the dispatcher, later ones are native
        assert op(torch.tensor(3.0)) == op.overload(torch.tensor(3.0)) == 1.5
    assert torchop.inverse(op)(torch.tensor(1.5)) == 3
    assert all(result == "SUCCESS" for result in torchop.opcheck(op).values())
    with pytest.raises((RuntimeError, TypeError), match="at most 1 argument"):
        op(torch.ones(3), 3.0)


def test_a_warning_points_at_the_definition_of_the_operator(namespace: str) -> None:
    schema = "(Tensor y) -> Tensor"
    with pytest.warns(SchemaWarning) as caught:  # noqa: PT031  (both the decorator and its call may warn)

        @torchop.custom_op(f"{namespace}::f", mutates_args=(), schema=schema)
        def f(x: Tensor) -> Tensor: ...

        torchop.custom_op(f"{namespace}::g", lambda x: x, mutates_args=(), schema=schema)
    assert [warning.filename for warning in caught] == [__file__, __file__]
    lines = [linecache.getline(__file__, warning.lineno) for warning in caught]
    assert ["::f" in lines[0], "::g" in lines[1]] == [True, True]


# --------------------------------------------------------------------------------------------------
# Mutation


@pytest.mark.parametrize(
    ("schema", "mutates_args"),
    [
        ("(Tensor x, Tensor y) -> Tensor", ()),
        ("(Tensor(a!) x, Tensor y) -> ()", ["x"]),
        ("(Tensor(a!) x, Tensor(b!)[] y, int n) -> ()", ("y", "x")),
        ("(Tensor(a!) x, Tensor(b!)[] y, int n) -> ()", "unknown"),
        ("(Tensor(a) x) -> Tensor(a)", ()),
    ],
)
def test_mutates_args_that_agrees_with_the_schema(schema: str, mutates_args: Any) -> None:
    compare.check_mutation(parse(schema), mutates_args)


@pytest.mark.parametrize(
    ("schema", "mutates_args", "words"),
    [
        ("(Tensor(a!) x) -> ()", (), ["mutates_args=()", "the op mutates {'x'}"]),
        ("(Tensor x) -> Tensor", ["x"], ["mutates_args=['x']", "the op mutates {}"]),
        ("(Tensor(a!) x, Tensor(b!) y) -> ()", ["x"], ["the op mutates {'x', 'y'}"]),
        ("(Tensor(a!) x, Tensor y) -> ()", "unknown", ["'unknown'", "the op mutates {'x'}"]),
        ("(Tensor(a!) x, int n) -> ()", ["x", "n"], ["['x', 'n']", "the op mutates {'x'}"]),
        ("(Tensor(a!) x) -> ()", ["y"], ["['y']", "the op mutates {'x'}"]),
        ("(Tensor(a!) x) -> ()", "x", ["'x'", "string"]),
    ],
)
def test_mutates_args_that_contradicts_the_schema(
    namespace: str, schema: str, mutates_args: Any, words: list[str]
) -> None:
    name = f"{namespace}::f"
    with pytest.raises(SchemaError) as caught:
        torchop.custom_op(name, lambda *args: None, mutates_args=mutates_args, schema=schema)
    message = str(caught.value)
    assert [word for word in words if word not in message] == []
    assert not is_defined(name)


# --------------------------------------------------------------------------------------------------
# Failed definitions leave nothing defined


@pytest.mark.parametrize(
    "schema",
    [
        "(Tensor x) -> Tensor",
        "(Tensor x, float factor, int n=1) -> ()",
        "(Tensor x, str factor, int n=1) -> Tensor",
        "(Tensor(a!) x, float factor, int n=1) -> Tensor",
        "(Tensor x, float factor, int n=1 -> Tensor",
        "f(Tensor x, float factor, int n=1) -> Tensor",
        "",
    ],
)
def test_a_refused_schema_leaves_its_name_free(namespace: str, schema: str) -> None:
    name = f"{namespace}::scale"
    with pytest.raises(SchemaError):
        torchop.custom_op(name, scale, mutates_args=(), schema=schema)
    assert not is_defined(name)
    op = torchop.custom_op(name, lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor")
    assert op(torch.ones(())) == 2
