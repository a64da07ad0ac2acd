"""Derives the name, the signature and the docstring of a form from those of another form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchop._schema.forms import Form
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def identified(
    kernel: Kernel, original: Callable[..., Any], name: OpName, schema: Schema
) -> Kernel:
    """Makes the kernel of a form look like the function of the functional operator."""
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
    except (TypeError, ValueError):  # that of a builtin; the schema says the rest
        return kernel
    added = schema.mutated if schema.form is Form.OUT else ()
    kernel.__signature__ = with_outputs(signature, added)  # type: ignore[attr-defined]
    return kernel


def without_outputs(kernel: Kernel, original: Callable[..., Any], outputs: Sequence[str]) -> Kernel:
    """Gives a kernel the signature of another one, without its outputs."""
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
    """A signature with keyword-only outputs at its end."""
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
