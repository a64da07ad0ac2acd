from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.devices import TYPE
from torchop import CustomOp

VALUES = {"examples": lambda: [(torch.ones(2),)]}


@pytest.fixture
def scale(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, factor: float = 2.0, *, negate: bool = False) -> Tensor:
        return x * (-factor if negate else factor)

    scale.register_fake(lambda x, factor, negate: torch.empty_like(x))
    return scale


def test_examples_are_tuples_or_dicts_and_made_anew(scale: Any) -> None:
    @scale.register_examples
    def examples() -> Any:
        yield (torch.ones(2),)
        yield [torch.ones(2), 3.0]
        yield {"x": torch.ones(2), "negate": True}

    made = scale.examples()
    results = [scale(*args, **kwargs)[0].item() for args, kwargs in made]
    assert results == [2.0, 3.0, -2.0]
    made[0][0][0].zero_()
    assert torch.equal(scale.examples()[0][0][0], torch.ones(2))


def test_without_examples(scale: Any) -> None:
    with pytest.raises(
        torchop.MissingRuleError, match=r"::scale has no examples\. Pass sample inputs, or register"
    ):
        scale.examples()


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (3, r"example 1 must be a tuple of positional arguments, or a dict .* got int"),
        ((), r"example 1 does not match the parameters of the operator, \(x, .*: missing .* 'x'\."),
        ((1, 2, 3), r"example 1 does not match .*too many positional"),
        ({"x": 1, "y": 2}, r"example 1 does not match .*unexpected keyword argument 'y'"),
    ],
)
def test_an_example_is_a_call(scale: Any, example: Any, message: str) -> None:
    scale.register_examples(lambda: [(torch.ones(1),), example])
    with pytest.raises(torchop.RuleSignatureError, match=message):
        scale.examples()


def test_examples_function_takes_no_arguments(scale: Any) -> None:
    with pytest.raises(torchop.RuleSignatureError, match="yields examples must be a function"):
        scale.register_examples([(torch.ones(1),)])
    with pytest.raises(torchop.RuleSignatureError, match=r"yields examples is called with \(\)"):
        scale.register_examples(lambda x: [])
    scale.register_examples(lambda: 3)
    with pytest.raises(torchop.RuleSignatureError, match="yield tuples of arguments, got 3"):
        scale.examples()


def test_examples_of_an_operator_of_another_library(namespace: str) -> None:
    torchop.define(f"{namespace}::copy", "(Tensor x) -> Tensor")
    torchop.impl(f"{namespace}::copy", TYPE, torch.clone)
    torchop.get_rule("examples").register(f"{namespace}::copy", lambda: [(torch.ones(1),)])
    assert torchop.opcheck(f"{namespace}::copy", test_utils="test_schema") == {
        "test_schema": "SUCCESS"
    }


def test_valid_takes_the_arguments_of_the_operator(scale: Any) -> None:
    for valid in (lambda x: True, lambda x, factor, negate, more: True, 3):
        with pytest.raises(torchop.RuleSignatureError, match="::scale: 'valid' of the examples"):
            scale.register_examples(list, valid=valid)
    with pytest.raises(torchop.MissingRuleError):
        scale.examples()


def test_valid_belongs_to_the_examples_it_was_registered_with(scale: Any) -> None:
    decorator = scale.register_examples(valid=lambda x, factor, *, negate: False)
    decorator(lambda: [(torch.ones(1),)])
    with pytest.raises(ValueError, match="rejects example 0"):
        torchop.testing.check(scale, only="memory.given")
    scale.register_examples(lambda: [(torch.ones(1),)])
    assert torchop.testing.check(scale, only="memory.given").ok


def test_valid_of_an_operator_of_another_library() -> None:
    with torchop.Library("aten", "FRAGMENT") as library:
        torchop.get_rule("examples").register(
            "aten::relu",
            lambda: [(torch.ones(1),)],
            lib=library,
            valid=lambda x: x.dtype is torch.float32,
        )
        (result,) = torchop.testing.check("aten::relu", only="dtypes.accepted").results
        assert result.details["dtypes"]["float64"] == "excluded"
