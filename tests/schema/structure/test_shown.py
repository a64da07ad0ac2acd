"""Reprs, records, explanations and errors show structures as their author wrote them.

Uses private names.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests.schema.structure.generated import Mode
from torchop import AliasError, MissingFakeError, TracingError
from torchop._inspect import call_record


@dataclasses.dataclass
class Options:
    weight: Tensor
    named: dict[str, Tensor]
    bias: Optional[Tensor] = None
    mode: Mode = Mode.LINEAR


@dataclasses.dataclass
class Found:
    y: Tensor
    parts: list[Optional[Tensor]]
    bits: int


def found(x: Tensor, options: Options, power: int = 2) -> Found:
    return Found(x**power * options.weight, [None, x + 1], 8)


def options() -> Options:
    return Options(torch.ones(2), {"a": torch.ones(3)})


def test_repr_shows_the_signature(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", found, mutates_args=())
    signature = f"{namespace}::op{inspect.signature(found)}"
    assert "options: 'Options'" in signature
    assert repr(op) == f"<torchop.CustomOp {signature}; kernels for every device>"
    assert "options:" in op._repr_html_()


def test_a_recorded_call_shows_the_structures(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", found, mutates_args=())
    with torchop.record(f"{namespace}::*") as recorded:
        op(torch.ones(2), options(), 3)
    (((call, _),),) = recorded.values()
    assert call_record.described(f"{namespace}::op", call) == (
        "(float32[2] on cpu, Options(weight=float32[2] on cpu, named={'a': float32[3] on cpu}, "
        "bias=None, mode=<Mode.LINEAR: 'linear'>), 3)"
    )
    # A record of an operator that is not defined, or defined with other arguments, is shown as is.
    flat = "(float32[2] on cpu, float32[2] on cpu, [float32[3] on cpu], 3, options_named_"
    assert call_record.described(f"{namespace}::other", call).startswith(flat)
    torchop.custom_op(f"{namespace}::other", of_dict, mutates_args=())
    assert call_record.described(f"{namespace}::other", call).startswith(flat)


def of_dict(x: dict[str, Tensor]) -> Tensor:
    return x["a"] + 1


def aliasing(kind: str) -> Any:
    def function(x: Tensor, options: Options) -> Found:
        y, part = x + 1, x + 2
        if kind == "input":
            y = options.weight
        elif kind == "item":
            part = options.named["a"]
        else:
            part = y
        return Found(y, [None, part], 8)

    return function


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("input", r"the result\.y is input 'options\.weight' itself"),
        ("item", r"the result\.parts\[\*\] is input 'options\.named\.values\[0\]' itself"),
        ("output", r"the result\.parts\[\*\] shares memory with the result\.y"),
    ],
)
def test_an_aliased_result_is_named_by_its_path(namespace: str, kind: str, message: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", aliasing(kind), mutates_args=())
    with pytest.raises(AliasError, match=message):
        op(torch.ones(2), options())


def test_a_formula_that_cannot_be_traced_is_shown_with_structures(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", found, mutates_args=())
    op.register_fake(found)

    def setup_context(ctx: Any, inputs: Any, output: Found) -> None:
        ctx.save_for_backward(inputs[0])

    @op.register_autograd(setup_context=setup_context)
    def _(ctx: Any, grad: Found) -> Any:
        (x,) = ctx.saved_tensors
        return grad.y * x.numpy().max(), None, None

    def program(x: Tensor) -> Tensor:
        result: Found = op(x, options())
        return result.y.sum()

    call = torch.compile(program, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="cannot run in a compiler's trace") as caught:
        call(torch.ones(2, requires_grad=True))
    error: Any = caught.value
    while not isinstance(error, TracingError) and error.__cause__ is not None:
        error = error.__cause__
    assert (
        f"def backward(grad: {__name__}.Found, x: torch.Tensor, options: {__name__}.Options, "
        f"power: int) -> tuple[Tensor | None, {__name__}.Options]: ..."
    ) in str(error)


def test_explain_names_the_field(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=("options.weight",))
    def op(x: Tensor, options: Options) -> None:
        options.weight.add_(x)

    given = dataclasses.replace(options(), weight=torch.ones(1).expand(2))
    text = str(torchop.explain(op, torch.ones(2), given))
    assert "options.weight" in text
    assert "options_weight" not in text


def test_a_missing_fake_kernel_is_suggested_with_the_parameters(namespace: str) -> None:
    op = torchop.custom_op(f"{namespace}::op", found, mutates_args=())
    with torch._subclasses.FakeTensorMode():
        given = Options(torch.ones(2), {})
        with pytest.raises(MissingFakeError, match=r"\(x, options, power\)(.|\n)*Found, as the"):
            op(torch.ones(2), given)
