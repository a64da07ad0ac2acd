"""FLOP formulas for `torch.utils.flop_counter.FlopCounterMode`."""

from __future__ import annotations

from typing import Any

import torch
import torch.library

from torchop._compat import classes, flop_counter
from torchop._compat.flop_counter import Count
from torchop._core.user_rule import Rule
from torchop._errors import ResultError
from torchop._schema.callables import Function, Lambda
from torchop.extend import OpLike, OpOverload, observer, short_repr


class _FlopFormulaRule(Rule[Count]):
    """The rule that stores an operator's FLOP formula.

    A registered formula takes shapes, or tensors with `get_raw`. The rule stores a wrapper that
    takes a call's arguments, keyword arguments and result.
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
            return self.lookup(op)(*call)

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


def register_flop_formula(
    op: OpLike,
    fn: Function | Lambda | None = None,
    /,
    *,
    get_raw: bool = False,
    lib: torch.library.Library | None = None,
) -> Function:
    """Register the number of operations of a call, for `torch.utils.flop_counter`.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        fn: a function of the operator's arguments that returns an int. Tensors are replaced with
            their shape, a `torch.Size`. If it has a parameter `out_shape`, it also receives the
            shape of the result. For several results, this is a tuple or the structure that the
            operator returns, with None for values that are not tensors.
        get_raw: whether to pass tensors instead of shapes, and the result as `out_val`.
        lib: the library that owns the registration. By default, it lasts as long as the operator.

    Returns:
        `fn`, or a decorator if `fn` is omitted.
    """
    return FLOP_FORMULA.register(op, fn, lib=lib, get_raw=get_raw)
