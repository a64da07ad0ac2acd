"""The arguments that a function of `torchop.extend.observer` gets, and rejected signatures.

Uses private names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop._core.observers import call_signature, check_arguments, observer


@dataclasses.dataclass(frozen=True)
class Options:
    weight: Tensor
    scale: float = 2.0


@pytest.fixture
def flat(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::flat", mutates_args=())
    def flat(x: Tensor, scale: float = 2.0, *, negate: bool = False) -> Tensor:
        return x * scale

    return flat.overload


@pytest.fixture
def structured(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::structured", mutates_args=())
    def structured(x: Tensor, options: Options, *, negate: bool = False) -> Tensor:
        return x * options.scale

    return structured.overload


def everything(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


def test_a_function_gets_the_arguments_that_equal_their_default(flat: Any) -> None:
    ask = observer("a test", flat, everything)
    assert ask("x") == (("x", 2.0), {"negate": False})
    assert ask("x", 3.0, negate=True) == (("x", 3.0), {"negate": True})


def test_stock_operators_are_called_by_their_schema() -> None:
    ask = observer("a test", torch.ops.aten.add.Tensor, everything)
    assert ask("x", "y") == (("x", "y"), {"alpha": 1})
    assert str(call_signature(torch.ops.aten.add.Tensor)) == "(self, other, *, alpha=1)"


def test_positional_arguments_may_be_passed_by_name() -> None:
    ask = observer("a test", torch.ops.aten.addcmul.default, everything)
    assert ask("x", tensor2="z", tensor1="y", value=2) == (("x", "y", "z"), {"value": 2})
    ask = observer("a test", torch.ops.aten.softplus.default, everything)
    assert ask("x", threshold=3) == (("x", 1, 3), {})


def test_structures_are_built_from_the_arguments(structured: Any) -> None:
    ask = observer("a test", structured, everything, leading=("ctx",))
    args, kwargs = ask("ctx", "x", "w", options_scale=3.0)
    assert args == ("ctx", "x", Options("w", 3.0))  # type: ignore[arg-type]  # the values may also be shapes, for example
    assert kwargs == {"negate": False}


@pytest.mark.parametrize("kind", ["flat", "structured"])
def test_observer_passes_the_result_if_the_function_takes_it(
    kind: str, request: pytest.FixtureRequest
) -> None:
    op = request.getfixturevalue(kind)
    arguments = ("x",) if kind == "flat" else ("x", "w")
    taking = observer("a test", op, lambda x, _, *, negate, out: out, result="out")
    assert taking(*arguments, out="result") == "result"
    by_position = observer("a test", op, lambda x, _, negate, out: out, result="out")
    assert by_position(*arguments, out="result") == "result"
    without = observer("a test", op, lambda x, _, negate: x, result="out")
    assert without(*arguments, out="result") == "x"
    with pytest.raises(
        torchop.RuleSignatureError, match=r"a test is called with \(x, .*\*, negate"
    ):
        observer("a test", op, lambda x, _, *, negate, other: 0, result="out")


@pytest.mark.parametrize("kind", ["flat", "structured"])
def test_function_with_other_parameters_is_rejected(
    kind: str, request: pytest.FixtureRequest
) -> None:
    op = request.getfixturevalue(kind)
    expected = rf"a test is called with \(ctx, {', '.join(call_signature(op).parameters)[:-8]}"
    for refuse in (observer, check_arguments):
        with pytest.raises(torchop.RuleSignatureError, match="a test must be a function, got 3"):
            refuse(what="a test", op=op, function=3)
        with pytest.raises(torchop.RuleSignatureError, match=expected):
            refuse(what="a test", op=op, function=lambda x: 0, leading=("ctx",))
