"""How native calls record gradients for an operator that somebody else registered.

Its formula is PyTorch's `autograd.Function`, which takes the arguments as the dispatcher passes
them, with lists of tensors spread out, and without those that equal their default.

Before the dispatcher calls a Python kernel, it drops arguments that equal the schema's default: at
the end of the positional ones, and anywhere among the keyword-only ones. The kernel then uses the
default of its own signature. Native calls drop arguments in C++; this module does it for formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop._compat import stock_kernels
from torchop._native import low_level
from torchop._native.plan import Gradient
from torchop.extend import Argument, OpName, OpOverload, Schema


def find(
    native: Any, name: OpName, overload: OpOverload, schema: Schema
) -> tuple[Any, Gradient, tuple[Any, ...]]:
    """The kernel at Autograd if it is known, how to record a gradient, and its sources.

    The second may be a string that says why the dispatcher has to record gradients.
    """
    kernel, formula = _kernel_and_formula(native, name, overload)
    if formula is None:
        return *low_level.registered_gradient(native, name), ()
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
    """Whether the kernel at Autograd, if there is one, is PyTorch's or torchop's."""
    kernel, formula = _kernel_and_formula(native, name, overload)
    is_ours = low_level.definition_of_gradient(kernel) is not None
    return kernel is None or formula is not None or is_ours


def _kernel_and_formula(
    native: Any, name: OpName, overload: OpOverload
) -> tuple[Any, stock_kernels.StockFormula | None]:
    kernel = native.python_kernel(name.packet, name.overload, "AutogradCPU")
    return kernel, None if kernel is None else stock_kernels.recognize_formula(kernel, overload)


def _setup_context(
    formula: stock_kernels.StockFormula, schema: Schema
) -> Callable[..., Any] | None:
    """The user's `setup_context`, called as PyTorch calls it."""
    function = formula.setup_context
    if not function:  # PyTorch asks in the same way
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
    """The arguments of the formula's function for all positional arguments, if there are lists.

    Also returns the function that computes, from the result, what PyTorch keeps of the lists in
    `ctx`.
    """
    note_lists = formula.note_lists
    if note_lists is None:
        return None

    def inputs(args: tuple[Any, ...]) -> tuple[list[Any], Callable[[Any], Any]]:
        return note_lists(args[: _count_passed(args, schema)])

    return inputs


# Nobody can tell two equal values of these types apart.
_SIMPLE = (type(None), int, float, bool, str, torch.dtype, torch.layout, torch.memory_format)


def _as_filled(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], schema: Schema
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that torch.library passes to `setup_context`.

    It fills in the defaults that the dispatcher dropped, as the schema stores them: a dtype as a
    number.
    """
    kept = schema.kept_defaults
    passed = _count_passed(args, schema)
    filled = (*args[:passed], *(kept[a.name] for a in schema.positional[passed:]))
    return filled, {
        a.name: kept[a.name] if _is_dropped(kwargs[a.name], a, schema) else kwargs[a.name]
        for a in schema.keyword_only
    }


def _has_simple_defaults(schema: Schema) -> bool:
    """Whether a schema stores each default as Python does, so that `==` tells what is dropped."""
    return all(
        type(kept) in _SIMPLE and kept == argument.default
        for argument in schema.arguments
        if argument.has_default
        for kept in [schema.kept_defaults[argument.name]]
    )


def _count_passed(args: Sequence[Any], schema: Schema) -> int:
    """How many of all positional arguments the dispatcher would pass."""
    end = len(args)
    while end > 0 and _is_dropped(args[end - 1], schema.positional[end - 1], schema):
        end -= 1
    return end


def _is_dropped(value: Any, argument: Argument, schema: Schema) -> bool:
    """Whether the dispatcher passes nothing for an argument, because it equals its default."""
    if not argument.has_default:
        return False
    if value is argument.default:
        return True
    # The dispatcher keeps the default of a device as a str, and no device equals a str.
    return argument.name not in schema.spelled_devices and _is_equal(value, argument.default)


def _is_equal(value: Any, default: Any) -> bool:
    if type(value) is not type(default):
        return False
    if isinstance(value, list):
        return len(value) == len(default) and all(map(_is_equal, value, default))
    return not isinstance(value, Tensor) and bool(value == default)
