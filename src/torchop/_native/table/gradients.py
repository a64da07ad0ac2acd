"""Record gradients in native calls to operators that `torchop.custom_op` did not create.

A backward formula that was registered with `torchop.register_autograd` is in the operator's
definition. For a formula that was registered with `torch.library.register_autograd`, PyTorch has
created an `autograd.Function`. Its inputs are the arguments that the dispatcher passes to kernels,
with lists of tensors flattened.

Before the dispatcher calls a Python kernel, it drops the arguments that equal their default, if
they are keyword-only or at the end of the positional arguments. In native calls, which skip the
dispatcher, C++ drops these arguments before it calls kernels and formulas.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._compat import stock_kernels
from torchop._compat.classes import OpOverload
from torchop._native.plan import Gradient
from torchop._native.table import ours
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema


def find(
    native: Any, name: OpName, overload: OpOverload, schema: Schema
) -> tuple[Any, Gradient, tuple[Any, ...]]:
    """Find out how native calls (without the dispatcher) to an operator record gradients.

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
    # For an argument that the dispatcher dropped, torch.library passes the default value from the
    # schema to `setup_context`, without converting it. For a dtype, for example, this is a number.
    raw = schema.raw_defaults
    defaults = tuple(raw.get(argument.name) for argument in schema.arguments)
    setup_context = _setup_context(formula)
    gradient = formula.function, setup_context, formula.note_lists, None, defaults
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


def _setup_context(formula: stock_kernels.StockFormula) -> Callable[..., Any] | None:
    function = formula.setup_context
    if not function:  # not `is None`, because torch/_library/autograd.py tests it like this
        return None
    takes_keywords = formula.takes_keywords

    def setup_context(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        if takes_keywords:
            function(ctx=ctx, inputs=inputs, keyword_only_inputs=keywords, output=output)
        else:
            function(ctx=ctx, inputs=inputs, output=output)

    return setup_context
