"""Read the arguments and results of a parsed schema. Uses private names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from torch.overrides import TorchFunctionMode

from tests._support import strategies
from torchop._schema import defaults
from torchop.extend import Schema


def parse(text: str) -> Schema:
    return Schema(torch._C.parse_schema(text), text)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("int x=3", 3),
        ("float x=-0.5", -0.5),
        ("bool x=True", True),
        ("Scalar x=2", 2),
        ('str x="a\\"b"', 'a"b'),
        ("str? x=None", None),
        ("int[2] x=1", [1, 1]),
        ("float[] x=[1.5, 2.0]", [1.5, 2.0]),
        ("ScalarType x=bfloat16", torch.bfloat16),
        ("ScalarType? x=float32", torch.float32),
        ("ScalarType? x=None", None),
        ("ScalarType[] x=[bool]", [torch.bool]),
        ("Device x='cuda:1'", torch.device("cuda", 1)),
        ("Device? x='cpu'", torch.device("cpu")),
        ("Device? x=None", None),
        ("Layout x=strided", torch.strided),
        ("MemoryFormat x=contiguous_format", torch.contiguous_format),
    ],
)
def test_default_is_converted_for_the_kernel(written: str, value: Any) -> None:
    (argument,) = parse(f"f({written}) -> ()").arguments
    assert argument.has_default
    assert argument.default == value
    assert type(argument.default) is type(value)


@strategies.stable
@given(strategies.nasty_text)
def test_written_schema_can_be_parsed_again(text: str) -> None:
    schema = parse(f"f(str x={defaults.render(text, 'str')}) -> ()")
    assert parse(schema.written).arguments[0].default == text


# --------------------------------------------------------------------------------------------------
# fill_defaults adds the defaults of left-out arguments

SCHEMA = parse("f(Tensor x, int n=3, int[] box=[1, 2], *, float scale=0.5, str mode) -> Tensor")


@pytest.mark.parametrize(
    ("args", "kwargs", "filled", "keywords"),
    [
        (("x",), {"mode": "m"}, ("x", 3, [1, 2]), {"scale": 0.5, "mode": "m"}),
        (("x", 4), {"mode": "m"}, ("x", 4, [1, 2]), {"scale": 0.5, "mode": "m"}),
        (("x", 4, [5]), {"mode": "m", "scale": 2.0}, ("x", 4, [5]), {"scale": 2.0, "mode": "m"}),
        (("x", None), {"mode": None}, ("x", None, [1, 2]), {"scale": 0.5, "mode": None}),
    ],
)
def test_fill_defaults_adds_only_dropped_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], filled: tuple[Any, ...], keywords: dict[str, Any]
) -> None:
    assert SCHEMA.fill_defaults(args, kwargs) == (filled, keywords)


def test_fill_defaults_makes_a_list_of_its_own_for_each_call() -> None:
    schema = parse("f(int[] box=[1], *, float[] scale=[1.0]) -> ()")
    (box,), keywords = schema.fill_defaults((), {})
    box.append(2)
    keywords["scale"].clear()
    assert schema.fill_defaults((), {}) == (([1],), {"scale": [1.0]})


def test_modes_of_the_caller_see_nothing_of_the_reading() -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        (argument,) = parse('ns::f(Device? device="cpu") -> ()').arguments
        assert seen == []
        torch.device("cpu")
    assert seen == [torch.device]
    assert argument.default == torch.device("cpu")


def test_default_device_is_parsed_from_its_name() -> None:
    schema = parse('ns::f(Tensor x, Device? on="cpu", Device to="cpu", str y="cpu") -> ()')
    assert schema.spelled_devices <= {"on", "to"}
    assert "on" in schema.spelled_devices
    args, _ = schema.fill_defaults((T, "cpu"), {})
    assert args == (T, torch.device("cpu"), torch.device("cpu"), "cpu")
    meta = torch.device("meta")
    assert schema.fill_defaults((T, None, meta), {}) == ((T, None, meta, "cpu"), {})


T = torch.ones(1)
