"""Raise errors for missing backward formulas, and for formulas that read data in a trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from torchop._compat import functorch, tracing
from torchop._compat.fake_tensors import reads_data
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import MissingFormulaError, TracingError, add_note, short_text
from torchop._schema.structure.nodes import TENSOR_LISTS, Leaf
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


def note_if_autograd_was_used(definition: Definition, error: RuntimeError) -> None:
    """Add a note with the fix to the error of a kernel that called torch.autograd."""
    # The message of `run_backward` in torch/csrc/autograd/autograd.cpp
    if str(error).startswith("element 0 of tensors does not require grad"):
        add_note(
            error,
            f"in the kernel of {definition}. PyTorch records no gradients inside a kernel, even "
            "under torch.enable_grad. Use torch.func.grad or torch.func.vjp there",
        )


def raise_if_data_was_read(
    definition: Definition, part: str, values: Iterable[Any], error: Exception
) -> None:
    """Raise TracingError if a user's function failed because it read a tensor without data.

    Tensors have no data in a compiler's trace, for example, so the message suggests registering a
    backward kernel instead. `part` names the failed function in the message, such as "backward
    formula", and `values` are the arguments of that function.
    """
    tensor = next((t for t in tensors_in(values) if tracing.has_no_data(t)), None)
    if tensor is None or not reads_data(error, definition.overload):
        return
    # Quote only the first line of PyTorch's message, since the rest is advice about logging. The
    # full message is still available as `__cause__`.
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

    While tracing, an opaque result (a Python object instead of a tensor) is the object returned by
    the fake kernel. Reading its attribute would bake the fake kernel's value into the graph as a
    constant.
    """
    attribute = tracing.attribute_without_value(error)
    if attribute is None:
        return
    raise TracingError(
        f"{definition}: the {part} cannot run in a compiler's trace, because it read the attribute "
        f"{attribute!r} of an opaque object, whose value is only known when the graph runs. Pass "
        "the object to an operator that reads it. Or, if the objects never change, pass them by "
        "value; see torchop.opaque."
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
    results = [_annotation(kind) for kind in schema.returns if "Tensor" in kind]
    differentiated = [argument for argument in schema.positional if argument.holds_tensors]
    inputs = {argument.name: _annotation(argument.kind) for argument in differentiated}
    gradients = [_gradient(argument.is_tensor_list) for argument in differentiated]
    if structure is not None:  # show the author's types, not the flattened types of the schema
        results = [spell(a) for a, node in structure.results if node.holds_tensors] or results
        inputs = {p.name: spell(p.declared.annotation) for p in structure.parameters}
        gradients = [
            _gradient(p.node.kind.schema in TENSOR_LISTS)
            if isinstance(p.node, Leaf)
            else inputs[p.name]
            for p in structure.positional_parameters
            if p.node.holds_tensors
        ]
    grads = ["grad"] if len(results) == 1 else [f"grad_{n}" for n in range(len(results))]
    parameters = [*zip(grads, results, strict=True), *inputs.items()]
    returned = gradients[0] if len(gradients) == 1 else f"tuple[{', '.join(gradients)}]"
    return f"def backward({', '.join(f'{n}: {a}' for n, a in parameters)}) -> {returned}: ..."


def _gradient(is_list: bool) -> str:
    return "list[Tensor | None]" if is_list else "Tensor | None"


def _annotation(kind: str) -> str:
    if kind.startswith("Optional["):
        return f"{_annotation(kind[len('Optional[') : -1])} | None"
    if kind.startswith("List["):
        return f"list[{_annotation(kind[len('List[') : -1])}]"
    return "Tensor"
