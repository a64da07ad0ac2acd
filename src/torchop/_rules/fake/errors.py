from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torchop._compat import fake_tensors
from torchop._core.definition import Definition
from torchop._errors import (
    FakeKernelError,
    MissingFakeError,
    TracingError,
    short_repr,
    short_text,
)
from torchop._rules.effect import how_to_declare
from torchop._schema.schema import Schema
from torchop._schema.types import spell

# By default, FakeTensor logs a traceback for exceptions in fake kernels. Disable this for
# MissingFakeError, because its message already contains the fix.
fake_tensors.keep_out_of_log(MissingFakeError)


def missing_fake(definition: Definition) -> MissingFakeError:
    missing = f"There was no fake impl registered for {definition}"
    if definition.schema.returns_nothing:
        return MissingFakeError(f"{missing}, nor an effect. {how_to_declare(definition)}")
    parameters, result = _suggested(definition)
    return MissingFakeError(
        f"{missing}. torch.compile, torch.export and FakeTensor need one to compute the metadata "
        "of the outputs without running the kernel:\n\n"
        f"    @torchop.register_fake({str(definition)!r})\n"
        f"    def _({parameters}):\n"
        "        # with the shape, dtype, device and strides that the kernel returns\n"
        f"        return {result}\n"
    )


def data_was_read(definition: Definition, error: Exception) -> Exception:
    # Quote only the first line of PyTorch's message, because the rest is advice about logging.
    reading = short_text(str(error).partition("\n")[0])
    message = (
        f"{definition}: the fake kernel read the data of a tensor ({reading}). It runs on tensors "
        "that have none: it may use shapes, dtypes and devices only. If the size of an output "
        "depends on data, make it with torchop.get_ctx().new_dynamic_size()."
    )
    if isinstance(error, fake_tensors.DATA_DEPENDENT_ERRORS):
        # Keep the type of the exception, because Dynamo turns data-dependent errors into graph
        # breaks.
        return fake_tensors.explained_tracing_error(type(error), definition.overload, message)
    return FakeKernelError(message)


def attribute_was_read(definition: Definition, attribute: str) -> Exception:
    return TracingError(
        f"{definition}: the fake kernel read the attribute {attribute!r} of an opaque object, "
        "whose value is only known when the graph runs. Pass the value as an argument of its own, "
        "such as an int. Or, if the objects never change, pass them by value; see torchop.opaque."
    )


def source_of(function: Callable[..., Any]) -> str:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else short_repr(function)


def _suggested(definition: Definition) -> tuple[str, str]:
    schema, structure = definition.schema, definition.structure
    paths: dict[str, str] = {}
    positional, keyword_only = schema.parameters
    if structure is not None:  # show the author's parameters, not the flattened arguments
        paths = {leaf.name: leaf.path for leaf in structure.leaves}
        positional = [p.name for p in structure.parameters if not p.keyword_only]
        keyword_only = [p.name for p in structure.parameters if p.keyword_only]
    parameters = ", ".join((*positional, *(["*", *keyword_only] if keyword_only else [])))
    if structure is not None and structure.returns_objects:
        returned = inspect.signature(structure.function).return_annotation
        return parameters, f"...  # {spell(returned)}, as the kernel does"
    tensor = _suggested_tensor(schema, paths)
    outputs = {"Tensor": tensor, "List[Tensor]": f"[{tensor}]"}
    return parameters, ", ".join(outputs.get(kind, "...") for kind in schema.returns)


def _suggested_tensor(schema: Schema, paths: Mapping[str, str]) -> str:
    for argument in schema.arguments:
        name = paths.get(argument.name, argument.name)
        if argument.kind == "Tensor":
            return f"torch.empty_like({name})"
        if argument.is_tensor_list:
            return f"torch.empty_like({name}[0])"
    return "torch.empty(...)"
