"""The rule of ONNX translations; tests/export/test_onnx.py has what uses it."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import torchop

VALUES = {"onnx": lambda x: x}


@pytest.fixture
def op(namespace: str) -> torchop.CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    return scale


def test_a_translation_gets_all_arguments(op: Any) -> None:
    op.register_onnx(lambda x, factor: (x, factor))
    translate = torchop.get_rule("onnx").lookup(op)
    assert translate("x") == ("x", 2.0)
    assert translate("x", 3.0) == ("x", 3.0)


def test_a_translation_takes_the_arguments_of_the_operator(op: Any) -> None:
    with pytest.raises(torchop.RuleSignatureError, match="an ONNX translation"):
        op.register_onnx(lambda x: x)


def test_an_error_says_in_which_translation(op: Any) -> None:
    def wrong(x: Any, factor: float) -> Any:
        raise KeyError("nothing")

    op.register_onnx(wrong)
    with pytest.raises(KeyError) as caught:
        torchop.get_rule("onnx").lookup(op)("x")
    assert getattr(caught.value, "__notes__", [f"in the ONNX translation of {op.name}"]) == [
        f"in the ONNX translation of {op.name}"
    ]
