"""Create the names, schemas, signatures and docstrings of an operator's out= and in-place forms."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema, write_schema
from torchop._schema.text import lettered_alias, with_keyword_only, with_write, written_tensor


def form_name(name: OpName, form: Form) -> OpName:
    """Return the name of an in-place or out= form according to PyTorch's convention.

    For example, the forms of `add.Scalar` are `add_.Scalar` and `add.Scalar_out`.
    """
    if form is Form.INPLACE:
        return name._replace(name=f"{name.name}_")
    return name._replace(overload=f"{name.overload}_out" if name.overload else "out")


def inplace_schema(name: OpName, functional: Schema) -> Schema:
    first, *others = functional.written_arguments
    alias = lettered_alias(0)
    arguments = [with_write(first, alias), *others]
    return write_schema(name, arguments, [written_tensor(alias)], Form.INPLACE)


def out_schema(name: OpName, functional: Schema, outputs: Sequence[str]) -> Schema:
    results = [written_tensor(lettered_alias(index)) for index in range(len(outputs))]
    written = [f"{kind} {output}" for kind, output in zip(results, outputs, strict=True)]
    arguments = with_keyword_only(functional.written_arguments, written)
    return write_schema(name, arguments, results, Form.OUT)


Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def identified(
    kernel: Kernel, original: Callable[..., Any], name: OpName, schema: Schema
) -> Kernel:
    """Set the name, docstring and signature of the kernel of an in-place or out= form.

    `original` is the handle of the functional operator.
    """
    outputs = ", ".join(schema.mutated)
    purpose = (
        f"Overwrites {outputs} with the result of {original.__name__}, and returns it."
        if schema.form is Form.INPLACE
        else f"Writes the result of {original.__name__} into {outputs}, and returns that."
    )
    kernel.__name__ = name.local.replace(".", "_")
    outer, dot, _ = original.__qualname__.rpartition(".")
    kernel.__qualname__ = f"{outer}{dot}{kernel.__name__}"
    kernel.__module__ = original.__module__
    kernel.__doc__ = "\n\n".join(filter(None, [purpose, inspect.getdoc(original)]))
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):  # a builtin without a signature
        return kernel
    added = schema.mutated if schema.form is Form.OUT else ()
    kernel.__signature__ = with_outputs(signature, added)  # type: ignore[attr-defined]
    return kernel


def without_outputs(kernel: Kernel, original: Callable[..., Any], outputs: Sequence[str]) -> Kernel:
    try:
        signature = inspect.signature(original)
    except (TypeError, ValueError):
        return kernel
    parameters = [p for p in signature.parameters.values() if p.name not in outputs]
    kernel.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return kernel


def with_outputs(
    signature: inspect.Signature,
    names: Sequence[str],
    annotation: Any = Tensor,
    default: Any = inspect.Parameter.empty,
) -> inspect.Signature:
    parameters = list(signature.parameters.values())
    end = len(parameters)
    if parameters and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD:
        end -= 1
    parameters[end:end] = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default
        )
        for name in names
    ]
    return signature.replace(parameters=parameters)
