"""Default values: how they are written in a schema, and how they reach the kernel.

Uses private names.
"""

from __future__ import annotations

import enum
import functools
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchop
from torchop import SchemaError
from torchop._schema import defaults
from torchop.extend import Schema


class Level(enum.IntEnum):
    HIGH = 3


class Name(str):
    pass


def parse(text: str) -> Schema:
    return Schema(torch._C.parse_schema(f"f{text}"))


def read(text: str, schema_type: str) -> Any:
    return parse(f"({schema_type} x={text}) -> ()").arguments[0].default


# --------------------------------------------------------------------------------------------------
# Defaults written in a schema


@pytest.mark.parametrize(
    ("value", "schema_type", "text"),
    [
        (None, "Tensor?", "None"),
        (3, "SymInt", "3"),
        (True, "SymInt", "1"),
        (Level.HIGH, "SymInt", "3"),
        (-(2**63), "SymInt?", "-9223372036854775808"),
        (1, "float", "1.0"),
        (1e-8, "float?", "1e-08"),
        (np.float64(0.1), "float", "0.1"),
        (sys.float_info.min, "float", "2.2250738585072014e-308"),
        (False, "bool", "False"),
        (True, "Scalar", "True"),
        (2, "Scalar", "2"),
        (2.5, "Scalar?", "2.5"),
        ("", "str", '""'),
        ('say "hi"', "str", r'"say \"hi\""'),
        ("\\n", "str", r'"\\n"'),
        ("\n\t\r\0", "str", r'"\n\t\015\000"'),
        ("größe", "str?", '"größe"'),
        (Name("crop"), "str", '"crop"'),
        (torch.bfloat16, "ScalarType", "bfloat16"),
        (torch.device("cuda", 1), "Device", '"cuda:1"'),
        ([], "SymInt[]", "[]"),
        ((1, -2), "SymInt[]", "[1, -2]"),
        ([1, 0.5], "float[]", "[1.0, 0.5]"),
        ([True, False], "bool[]", "[True, False]"),
    ],
)
def test_a_default_is_written_so_that_the_parser_reads_it_back(
    value: Any, schema_type: str, text: str
) -> None:
    assert defaults.render(value, schema_type) == text
    assert read(text, schema_type) == (list(value) if isinstance(value, tuple) else value)


@pytest.mark.parametrize(
    ("value", "schema_type"),
    [
        ([1], "SymInt[]?"),
        ((1.0,), "float[]?"),
        ([None], "bool[]"),
        ([[1]], "SymInt[]"),
        ("ab", "SymInt[]"),
        ([], "Tensor[]"),
        ([None], "Tensor?[]"),
        ([1], "Scalar[]"),
        (torch.ones(1), "Tensor"),
        (5e-324, "float"),
        (float("inf"), "Scalar"),
        (2**64, "Scalar"),
        (10**400, "float"),
        (torch.float32, "Device"),
        (torch.device("cpu"), "ScalarType"),
        (Level.HIGH, "enum.Enum"),
    ],
)
def test_default_that_the_parser_cannot_read_is_rejected(value: Any, schema_type: str) -> None:
    with pytest.raises(SchemaError):
        defaults.render(value, schema_type)


# --------------------------------------------------------------------------------------------------
# Comparing a function's default with the schema's


@pytest.mark.parametrize(
    ("own", "argument", "same"),
    [
        (3, "int x=3", True),
        (3.0, "int x=3", True),
        (4, "int x=3", False),
        ("3", "int x=3", False),
        (None, "int x=3", False),
        (None, "int? x=None", True),
        (0, "int? x=None", False),
        ((1, 2), "int[] x=[1, 2]", True),
        ([1, 2], "int[] x=[1, 2]", True),
        ([1], "int[] x=[1, 2]", False),
        (1, "int[] x=[1]", False),
        ("cpu", "Device x='cpu'", True),
        (torch.device("cpu"), "Device? x='cpu'", True),
        ("meta", "Device x='cpu'", False),
        ("no device", "Device x='cpu'", False),
        (2.5, "Device x='cpu'", False),
        (torch.float32, "ScalarType x=float32", True),
        (torch.float16, "ScalarType x=float32", False),
        (torch.ones(2), "float x=1.0", False),
        (np.ones(2), "float x=1.0", False),
        ([torch.ones(2)], "int[] x=[1]", False),
        (torch.ones(2), "Tensor? x=None", False),
    ],
)
def test_same_default_compares_values(own: Any, argument: str, same: bool) -> None:
    assert defaults.same_default(own, parse(f"({argument}) -> ()").arguments[0]) is same


# --------------------------------------------------------------------------------------------------
# Calling a function with the schema's defaults


def none(x, n, *, scale):
    return x, n, scale


def other_positional(x, n=4, *, scale=0.5):
    return x, n, scale


def other_keyword(x, n=3, *, scale=1.5):
    return x, n, scale


def same(x, n=3, *, scale=0.5):
    return x, n, scale


def anything(*args, **kwargs):
    return (*args, kwargs["scale"])


@functools.wraps(same)
def wrapped(*args, **kwargs):
    return anything(*args, **kwargs)


FUNCTIONS = [
    none,
    other_positional,
    other_keyword,
    same,
    anything,
    wrapped,
]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_default_that_is_a_list_is_new_for_each_call(function: Any) -> None:
    schema = parse("(Tensor x, int[] n=[1], *, float scale=0.5) -> Tensor")
    bound = defaults.bind(function, schema)
    first, second = bound("x"), bound("x")
    assert first == second == ("x", [1], 0.5)
    assert first[1] is not second[1]


def test_replaced_defaults_of_a_function_are_not_seen() -> None:
    def function(x, n=3, *, scale=0.5):
        return x, n, scale

    bound = defaults.bind(function, parse("(Tensor x, int n=3, *, float scale=0.5) -> Tensor"))
    function.__defaults__, function.__kwdefaults__ = (4,), {"scale": 1.5}
    assert bound("x") == ("x", 3, 0.5)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_bound_function_sees_the_defaults_of_the_schema(function: Any) -> None:
    schema = parse("(Tensor x, int n=3, *, float scale=0.5) -> Tensor")
    bound = defaults.bind(function, schema)
    assert bound("x") == ("x", 3, 0.5)
    assert bound("x", 7) == ("x", 7, 0.5)
    assert bound("x", scale=2.0) == ("x", 3, 2.0)
    assert bound.__wrapped__ is function


@pytest.mark.parametrize("passed", [{}, {"n": 3}, {"n": 5}])
def test_an_operator_computes_with_the_default_of_its_schema(
    namespace: str, passed: dict[str, int]
) -> None:
    # The default of the function differs from the schema's. The dispatcher drops an argument that
    # equals the schema's default, so the function's default must not replace it.
    def scale(x: Tensor, n: int = 5) -> Tensor:
        return x * n

    with pytest.warns(torchop.SchemaWarning, match="default 5 in the function and 3 in the schema"):
        op = torchop.custom_op(
            f"{namespace}::scale", scale, mutates_args=(), schema="(Tensor x, int n=3) -> Tensor"
        )
    assert op(torch.ones(()), **passed) == passed.get("n", 3)


def test_a_kernel_that_writes_into_a_default_list_changes_no_later_call(namespace: str) -> None:
    def count(x: Tensor, box: list[int]) -> Tensor:
        box.append(0)
        return x * len(box)

    schema = "(Tensor x, int[] box=[1, 2]) -> Tensor"
    op = torchop.custom_op(f"{namespace}::count", count, mutates_args=(), schema=schema)
    assert [op(torch.ones(())).item() for _ in range(3)] == [3, 3, 3]
