"""Parse schemas with PyTorch's parser, and interpret PyTorch's schema classes."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch

from torchop._compat.classes import FunctionSchema
from torchop._errors import short_errors


@functools.cache
def is_identifier(text: str) -> bool:
    try:
        parse(f"{text}() -> ()")
    except RuntimeError:
        return False
    return True


def parse(text: str) -> FunctionSchema:
    with short_errors:
        return torch._C.parse_schema(text)


def is_backward_compatible(new: FunctionSchema, old: FunctionSchema) -> bool:
    """Return whether `new` accepts every call that `old` accepts, by PyTorch's rules for ATen."""
    return bool(cast(Any, new).is_backward_compatible_with(old))


def written_type(argument: Any) -> str:
    """Return the type of an argument as written in a schema, such as `SymInt` or `int[2]?`."""
    size = "" if argument.N is None else str(argument.N)
    return str(argument.real_type.str()).replace("[]", f"[{size}]", 1)


@functools.cache
def enumeration(kind: str) -> Mapping[int, Any]:
    """Return the Python objects of a schema type whose values are stored as integers.

    For ScalarType, for example, the result maps integers to dtypes. The result is cached, because
    computing it requires parsing a schema for each dtype.
    """
    if kind == "ScalarType":
        return dict(_dtype_codes())
    others: dict[str, Mapping[int, Any]] = {
        "Layout": {0: torch.strided},
        "MemoryFormat": {0: torch.contiguous_format},
    }
    return others.get(kind, {})


@functools.cache
def dtypes() -> Mapping[str, torch.dtype]:
    values = vars(torch).values()
    return {str(v).removeprefix("torch."): v for v in values if isinstance(v, torch.dtype)}


def _dtype_codes() -> Iterator[tuple[int, torch.dtype]]:
    for name, dtype in dtypes().items():
        # Skip some newer dtypes, which PyTorch's schema parser rejects as default values.
        with contextlib.suppress(RuntimeError):
            parsed = parse(f"f(ScalarType d={name}) -> ()")
            yield cast(int, parsed.arguments[0].default_value), dtype


def readable(text: str) -> str:
    """Convert a schema that PyTorch printed to a form that PyTorch's parser accepts.

    PyTorch prints every custom class as PyObject, which the parser rejects
    (torch/csrc/jit/frontend/schema_type_parser.cpp). So insert the name of a custom class instead.
    """
    if "PyObject" not in text:
        return text
    return re.sub(r"\bPyObject\b", custom_class(), text)


@functools.cache
def custom_class() -> str:
    """Return the name of a schema type that accepts objects of any class."""
    name = "torchop.Object"
    torch._C._register_opaque_type(name)
    return name


def is_group_name(annotation: Any) -> bool:
    """Return whether `annotation` is torch.distributed's GroupName, a NewType of str."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and annotation is getattr(module, "GroupName", object())
