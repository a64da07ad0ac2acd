"""FLOP formulas: functions that count an operator's FLOPs for PyTorch's `FlopCounterMode`."""

from __future__ import annotations

from typing import Any

import torch
import torch.library

from torchop._compat import classes, flop_counter, torch_ops
from torchop._compat.flop_counter import Count
from torchop._core.registry import own_definition
from torchop._core.user_rule import Rule
from torchop._errors import ResultError
from torchop._schema.callables import Function, Lambda
from torchop.extend import OpLike, OpName, OpOverload, observer, short_repr, warn


class _FlopFormulaRule(Rule[Count]):
    """Stores FLOP formulas as wrappers with the signature `(args, kwargs, result)`.

    A user's formula takes the operator's arguments and optionally the result. Unless `get_raw` is
    set, the user's formula receives shapes instead of tensors.
    """

    def validate(self, op: OpOverload, value: Any, *, get_raw: bool = False) -> Count:
        result_name = "out_val" if get_raw else "out_shape"
        formula = observer(f"{op.name()}: a FLOP formula", op, value, result=result_name)

        def count(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
            if not get_raw:
                args, kwargs, result = classes.tree_map(_shape, (args, kwargs, result))
            operations = formula(*args, **kwargs, **{result_name: result})
            if isinstance(operations, bool) or not isinstance(operations, (int, torch.SymInt)):
                raise ResultError(
                    f"{op.name()}: the FLOP formula must return the number of operations as an "
                    f"int, got {short_repr(operations)} of type {type(operations).__name__}."
                )
            return operations

        return count

    def attach(self, op: OpOverload) -> None:
        def count(*call: Any) -> Any:
            # A mode that was entered before the operator was deregistered may still call this
            # function.
            return 0 if torch_ops.is_deregistered(op) else self.lookup(op)(*call)

        if not flop_counter.add_count(op, count):
            raise RuntimeError(
                f"{op.name()} has a FLOP formula already, registered with "
                "torch.utils.flop_counter. For one count, pass another one to "
                "FlopCounterMode(custom_mapping=...)."
            )

    def detach(self, op: OpOverload) -> None:
        flop_counter.remove_count(op)


def _shape(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


FLOP_FORMULA = _FlopFormulaRule("flop_formula")


def _report_uncounted(name: str) -> None:
    """Warn about an operator of torchop that FlopCounterMode counts as 0 operations."""
    definition = own_definition(None, OpName.parse(name))
    if definition is not None and not definition.declaration.is_helper:
        warn(
            f"{name}: FlopCounterMode counts 0 operations for this operator, because it has no "
            "FLOP formula. Register one with register_flop_formula. If 0 is right, register a "
            "formula that returns 0.",
            UserWarning,
        )


flop_counter.on_uncounted_call(_report_uncounted)


def register_flop_formula(
    op: OpLike,
    fn: Function | Lambda | None = None,
    /,
    *,
    get_raw: bool = False,
    lib: torch.library.Library | None = None,
) -> Function:
    """Register a formula for the number of operations of a call, for `torch.utils.flop_counter`.

    Args:
        op: the operator, as a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: a function that takes the operator's arguments and returns an int. It receives a
            `torch.Size` in place of each tensor. If it has a parameter `out_shape`, it also
            receives the shape of the result. If the operator returns several results or a
            structure, `out_shape` has the same structure, with a shape in place of each tensor, and
            None in place of other values.
        get_raw: whether to pass the tensors themselves instead of their shapes. The parameter for
            the result is then called `out_val`.
        lib: the library that owns the registration: closing it removes the registration. By
            default, the registration lasts as long as the operator.

    Returns:
        `fn`, or a decorator if `fn` is omitted.
    """
    return FLOP_FORMULA.register(op, fn, lib=lib, get_raw=get_raw)
