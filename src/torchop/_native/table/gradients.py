"""Record gradients in native calls to operators that `torchop.custom_op` did not create.

A backward formula that was registered with `torchop.register_autograd` is in the operator's
definition. For a formula that was registered with `torch.library.register_autograd`, PyTorch has
created an `autograd.Function`. Its inputs are the arguments that the dispatcher passes to kernels,
with lists of tensors flattened.

Before the dispatcher calls a Python kernel, it drops the arguments that equal their default, if
they are keyword-only or at the end of the positional arguments. In native calls, C++ drops these
arguments for kernels, and this module drops them for formulas.
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
    """Find out how native calls to an operator record gradients.

    Return a tuple of three values:
    - the kernel at the Autograd key, which native calls skip, or None if there is none;
    - the functions that native calls need to record gradients, or a text that says why only the
      dispatcher can record gradients;
    - the dictionaries and sets in which these functions were found. If one of them changes, the
      functions must be looked up again.
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
    """Return True if torchop or torch.library registered the Autograd kernel, or if none exists."""
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
    function = formula.setup_context
    if not function:  # not `is None`, because torch/_library/autograd.py tests it like this
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
    """Return a function that flattens the positional arguments, or None if none of them is a list.

    The function returns the flat arguments, and a function that computes `ctx._pt_metadata` from
    the operator's result. In `_pt_metadata`, PyTorch stores the structure of the lists in the
    arguments and in the result.
    """
    note_lists = formula.note_lists
    if note_lists is None:
        return None

    def inputs(args: tuple[Any, ...]) -> tuple[list[Any], Callable[[Any], Any]]:
        return note_lists(args[: _count_passed(args, schema)])

    return inputs


# Types whose values can replace each other if they are equal.
_SIMPLE = (type(None), int, float, bool, str, torch.dtype, torch.layout, torch.memory_format)


def _as_filled(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], schema: Schema
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments that torch.library passes to `setup_context`.

    For an argument that the dispatcher dropped, torch.library passes the default in the form in
    which the schema stores it, for example a number for a dtype.
    """
    defaults = schema.raw_defaults
    passed = _count_passed(args, schema)
    filled = (*args[:passed], *(defaults[a.name] for a in schema.positional[passed:]))
    return filled, {
        a.name: defaults[a.name] if _is_dropped(kwargs[a.name], a, schema) else kwargs[a.name]
        for a in schema.keyword_only
    }


def _has_simple_defaults(schema: Schema) -> bool:
    """Return whether the schema stores all defaults unchanged, as simple values.

    If so, an argument that equals its default can be replaced with the stored default.
    """
    return all(
        type(stored) in _SIMPLE and stored == argument.default
        for argument in schema.arguments
        if argument.has_default
        for stored in [schema.raw_defaults[argument.name]]
    )


def _count_passed(args: Sequence[Any], schema: Schema) -> int:
    """Return how many positional arguments the dispatcher would pass to a Python kernel.

    The dispatcher drops arguments at the end that equal their defaults.
    """
    end = len(args)
    while end > 0 and _is_dropped(args[end - 1], schema.positional[end - 1], schema):
        end -= 1
    return end


def _is_dropped(value: Any, argument: Argument, schema: Schema) -> bool:
    if not argument.has_default:
        return False
    if value is argument.default:
        return True
    # Devices are never dropped here: the schema stores their defaults as str, and no torch.device
    # equals a str.
    return argument.name not in schema.spelled_devices and _is_equal(value, argument.default)


def _is_equal(value: Any, default: Any) -> bool:
    if type(value) is not type(default):
        return False
    if isinstance(value, list):
        return len(value) == len(default) and all(map(_is_equal, value, default))
    return not isinstance(value, Tensor) and bool(value == default)
