"""Recording gradients in native calls of an operator that `custom_op` did not define.

The gradient of `torchop.register_autograd` is read from its definition. The gradient of
`torch.library.register_autograd` is PyTorch's `autograd.Function`, which takes the arguments that
the dispatcher passes, with lists of tensors spread out.

Before the dispatcher calls a Python kernel, it drops arguments that equal the schema's default: at
the end of the positional arguments, and anywhere among the keyword-only ones. The kernel then uses
the default of its own signature. Native calls drop arguments in C++. This module drops them for
formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import stock_kernels
from torchop._compat.classes import OpOverload
from torchop._native.plan import Gradient
from torchop._native.table import ours
from torchop._schema.naming import OpName
from torchop._schema.schema import Argument, Schema


def find(
    native: Any, name: OpName, overload: OpOverload, schema: Schema
) -> tuple[Any, Gradient, tuple[Any, ...]]:
    """Return the kernel at Autograd if it is known, the gradient for a plan, and its sources.

    The gradient may be a string: the reason why the dispatcher must record gradients.
    """
    kernel, formula = _kernel_and_formula(native, name, overload)
    if formula is None:
        return *ours.registered_gradient(native, name), ()
    if problem := _problem(schema):
        return kernel, problem, ()
    gradient = (
        formula.function,
        _setup_context(formula, schema),
        _inputs(formula, schema),
    )
    return kernel, gradient, formula.sources


def _problem(schema: Schema) -> str | None:
    if schema.is_view:
        return "the operator returns views of arguments"
    if schema.keyword_only_tensors:
        return "PyTorch refuses that, as a tensor is keyword-only, such as out="
    return None


def knows_autograd(native: Any, name: OpName, overload: OpOverload) -> bool:
    """Return whether there is no kernel at Autograd, or one of torch.library or torchop."""
    kernel, formula = _kernel_and_formula(native, name, overload)
    is_ours = ours.definition_of_gradient(kernel) is not None
    return kernel is None or formula is not None or is_ours


def _kernel_and_formula(
    native: Any, name: OpName, overload: OpOverload
) -> tuple[Any, stock_kernels.StockFormula | None]:
    kernel = native.python_kernel(name.packet, name.overload, "AutogradCPU")
    return kernel, None if kernel is None else stock_kernels.recognize_formula(kernel, overload)


def _setup_context(
    formula: stock_kernels.StockFormula, schema: Schema
) -> Callable[..., Any] | None:
    """Return the user's `setup_context`, wrapped to be called as PyTorch calls it."""
    function = formula.setup_context
    if not function:  # the test of torch/_library/autograd.py
        return None
    is_simple, takes_keywords = _has_simple_defaults(schema), formula.takes_keywords

    def setup_context(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        if not is_simple:
            inputs, keywords = _as_filled(inputs, keywords, schema)
        if takes_keywords:
            function(ctx=ctx, inputs=inputs, keyword_only_inputs=keywords, output=output)
        else:
            function(ctx=ctx, inputs=inputs, output=output)

    return setup_context


def _inputs(
    formula: stock_kernels.StockFormula, schema: Schema
) -> Callable[[tuple[Any, ...]], tuple[list[Any], Callable[[Any], Any]]] | None:
    """Return a function that flattens positional arguments for the formula; None without lists.

    The function returns the flat inputs, and a function that computes PyTorch's description of the
    lists, `ctx._pt_metadata`, from the result.
    """
    note_lists = formula.note_lists
    if note_lists is None:
        return None

    def inputs(args: tuple[Any, ...]) -> tuple[list[Any], Callable[[Any], Any]]:
        return note_lists(args[: _count_passed(args, schema)])

    return inputs


# Types whose equal values cannot be distinguished.
_SIMPLE = (type(None), int, float, bool, str, torch.dtype, torch.layout, torch.memory_format)


def _as_filled(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], schema: Schema
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that torch.library passes to `setup_context`.

    It replaces the arguments that the dispatcher dropped with the defaults as the schema stores
    them, such as a number for a dtype.
    """
    kept = schema.raw_defaults
    passed = _count_passed(args, schema)
    filled = (*args[:passed], *(kept[a.name] for a in schema.positional[passed:]))
    return filled, {
        a.name: kept[a.name] if _is_dropped(kwargs[a.name], a, schema) else kwargs[a.name]
        for a in schema.keyword_only
    }


def _has_simple_defaults(schema: Schema) -> bool:
    """Return whether the schema stores each default as Python does.

    `==` then decides which arguments the dispatcher drops.
    """
    return all(
        type(kept) in _SIMPLE and kept == argument.default
        for argument in schema.arguments
        if argument.has_default
        for kept in [schema.raw_defaults[argument.name]]
    )


def _count_passed(args: Sequence[Any], schema: Schema) -> int:
    """Return how many of the positional arguments the dispatcher would pass."""
    end = len(args)
    while end > 0 and _is_dropped(args[end - 1], schema.positional[end - 1], schema):
        end -= 1
    return end


def _is_dropped(value: Any, argument: Argument, schema: Schema) -> bool:
    """Return whether the dispatcher drops an argument because it equals its default."""
    if not argument.has_default:
        return False
    if value is argument.default:
        return True
    # The dispatcher stores the default of a device as a str, and no device equals a str.
    return argument.name not in schema.spelled_devices and _is_equal(value, argument.default)


def _is_equal(value: Any, default: Any) -> bool:
    if type(value) is not type(default):
        return False
    if isinstance(value, list):
        return len(value) == len(default) and all(map(_is_equal, value, default))
    return not isinstance(value, Tensor) and bool(value == default)
