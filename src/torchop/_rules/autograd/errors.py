"""Errors for missing formulas and for formulas that read data while being traced."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchop._compat import functorch, tracing
from torchop._compat.fake_tensors import reads_data
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import MissingFormulaError, TracingError, short_text
from torchop._schema.schema import Argument
from torchop._schema.types import spell


def missing_formula(definition: Definition) -> MissingFormulaError:
    derivable = definition.is_ours and definition.schema.is_functional
    derive = (
        " If PyTorch can differentiate the operator's body, call derive_autograd() on the handle "
        "instead."
    )
    return MissingFormulaError(
        f"Trying to backward through {definition} but no autograd formula was registered. "
        f"Register one with register_autograd({str(definition)!r}, backward, "
        f"setup_context=...).{derive * derivable}"
    )


def raise_if_data_was_read(
    definition: Definition, part: str, values: Iterable[Any], error: Exception
) -> None:
    """Raise TracingError if a user's function failed because it read a tensor that has no data.

    For example, tensors have no data in a compiler's trace. The message suggests a backward kernel.
    `part` names the function that failed, such as "backward formula". `values` are its arguments.
    """
    tensor = next((t for t in tensors_in(values) if tracing.has_no_data(t)), None)
    if tensor is None or not reads_data(error, definition.overload):
        return
    # Quote only the first line of PyTorch's message. The other lines are advice about logging, and
    # `__cause__` still contains them.
    reading = short_text(str(error).partition("\n")[0])
    raise TracingError(
        f"{definition}: the {part} cannot run {_place(tensor)}, because it read the data of a "
        f"tensor ({reading}). Turn the backward into an operator with parameters for the "
        "arguments, results and residuals to save:\n\n"
        f"    {_outline(definition)}\n"
        f"    torchop.register_autograd({str(definition)!r}, backward_kernel=backward)\n"
    ) from error


def raise_if_attribute_was_read(definition: Definition, part: str, error: Exception) -> None:
    """Raise TracingError if a user's function failed because it read an opaque object's attribute.

    In a trace, an opaque result is the object that the fake kernel returned, so the graph would
    contain the value of the fake kernel's object as a constant.
    """
    attribute = tracing.attribute_without_value(error)
    if attribute is None:
        return
    raise TracingError(
        f"{definition}: the {part} cannot run in a compiler's trace, because it read the attribute "
        f"{attribute!r} of an opaque object, whose value is only known when the graph runs. Pass "
        f"the object to an operator that reads it. Or, if all objects have the same "
        f"{attribute!r}, name it in register_opaque_type(members=...)."
    ) from error


def _place(tensor: Tensor) -> str:
    if tracing.is_traced(tensor):
        return "in a compiler's trace"
    if functorch.is_wrapped(tensor):
        return "in a transform of torch.func"
    kind = "batch of gradients" if type(tensor) is Tensor else type(tensor).__name__
    return f"on a {kind}"


def _outline(definition: Definition) -> str:
    schema, structure = definition.schema, definition.structure
    results = [kind for kind in schema.returns if "Tensor" in kind]
    grads = ["grad"] if len(results) == 1 else [f"grad_{n}" for n in range(len(results))]
    parameters = [f"{n}: {_annotation(kind)}" for n, kind in zip(grads, results, strict=True)]
    differentiated = [argument for argument in schema.positional if argument.holds_tensors]
    if structure is None:
        parameters += [f"{each.name}: {_annotation(each.kind)}" for each in differentiated]
    else:  # show the user's parameters, not the flattened arguments of the schema
        parameters += [f"{p.name}: {spell(p.declared.annotation)}" for p in structure.parameters]
    gradients = [_gradient(argument) for argument in differentiated]
    returned = gradients[0] if len(gradients) == 1 else f"tuple[{', '.join(gradients)}]"
    return f"def backward({', '.join(parameters)}) -> {returned}: ..."


def _gradient(argument: Argument) -> str:
    return "list[Tensor | None]" if argument.is_tensor_list else "Tensor | None"


def _annotation(kind: str) -> str:
    if kind.startswith("Optional["):
        return f"{_annotation(kind[len('Optional[') : -1])} | None"
    if kind.startswith("List["):
        return f"list[{_annotation(kind[len('List[') : -1])}]"
    return "Tensor"
