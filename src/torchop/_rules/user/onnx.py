"""ONNX translations: a call of an operator, written in operators of ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.library

from torchop._core.user_rule import Rule
from torchop._errors import add_note
from torchop._schema.callables import Function, Lambda
from torchop.extend import Operator, OpLike, OpOverload, observer


class _OnnxRule(Rule[Callable[..., Any]]):
    """A function of the operator's arguments that calls operators of onnxscript."""

    def validate(self, op: OpOverload, value: Any) -> Callable[..., Any]:
        what = f"{op.name()}: an ONNX translation"
        function = observer(what, op, value)
        operator = Operator(op, what)

        def translate(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
            except Exception as error:
                add_note(error, f"in the ONNX translation of {op.name()}")
                raise
            return operator.flat_result(result)

        return translate


ONNX = _OnnxRule("onnx")


def register_onnx(
    op: OpLike, fn: Function | Lambda | None = None, /, *, lib: torch.library.Library | None = None
) -> Function:
    """Registers the translation of an operator to ONNX, for `torchop.export.onnx`.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: takes the operator's arguments, with values of the ONNX graph instead of tensors, and
            returns what the operator returns. It calls operators of onnxscript, such as those of
            `onnxscript.opset20`. For an operator that writes into arguments, it returns what the
            operator returns besides these arguments, and then the new value of each.
        lib: the library whose lifetime the registration shares; by default it stays as long as
            the operator.

    Returns:
        `fn`; without it, a decorator.
    """
    return ONNX.register(op, fn, lib=lib)
