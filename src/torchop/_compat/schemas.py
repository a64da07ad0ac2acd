"""The language of schemas: its parser, its enumerations and its classes."""

from __future__ import annotations

import contextlib
import functools
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch._library import opaque_object

from torchop._compat.classes import FunctionSchema
from torchop._errors import short_errors


def is_identifier(text: str) -> bool:
    """Whether the schema parser reads an ASCII identifier as one, not as a keyword of its own."""
    return text not in _MAYBE_KEYWORDS or _is_accepted(text)


# The names that a parser of schemas may refuse: some of Python's keywords, and two names more. To
# ask it about every new name would be a part of what a definition costs. A keyword that it gained
# since is refused with the schema it is in.
_MAYBE_KEYWORDS = frozenset({*keyword.kwlist, "Ellipsis", "NoneType"})


@functools.cache
def _is_accepted(text: str) -> bool:
    try:
        parse(f"{text}() -> ()")
    except RuntimeError:
        return False
    return True


def parse(text: str) -> FunctionSchema:
    """Parses a schema with a name; raises RuntimeError with the parser's own explanation."""
    with short_errors:
        return torch._C.parse_schema(text)


def is_backward_compatible(new: FunctionSchema, old: FunctionSchema) -> bool:
    """Whether calls of the old schema are calls of the new one, by the rule for aten operators."""
    return bool(cast(Any, new).is_backward_compatible_with(old))


def written_type(argument: Any) -> str:
    """The type of an argument as schemas write it, such as `SymInt` or `int[2]?`."""
    size = "" if argument.N is None else str(argument.N)
    return str(argument.real_type.str()).replace("[]", f"[{size}]", 1)


@functools.cache
def enumeration(kind: str) -> Mapping[int, Any]:
    """The Python objects of an enumeration, of which a schema stores integers; empty for others.

    Made for the first default that needs it: asking the parser for every dtype takes its time.
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
    """All dtypes, by their names, such as "float32"."""
    values = vars(torch).values()
    return {str(v).removeprefix("torch."): v for v in values if isinstance(v, torch.dtype)}


def _dtype_codes() -> Iterator[tuple[int, torch.dtype]]:
    for name, dtype in dtypes().items():
        # Newer dtypes can be made, but not yet written as a default.
        with contextlib.suppress(RuntimeError):
            parsed = parse(f"f(ScalarType d={name}) -> ()")
            yield cast(int, parsed.arguments[0].default_value), dtype


def custom_class_name(annotation: Any) -> str | None:
    """The schema name of a registered opaque (custom) class, Enum and Generator included."""
    if not isinstance(annotation, type):
        return None
    # The new name since 2.15, where the other one logs that it is deprecated, and may go later.
    is_custom = getattr(opaque_object, "is_custom_class", None) or opaque_object.is_opaque_type
    if not is_custom(annotation):
        # A custom class since 2.13; before, the schema language had a type of its own for it.
        return "Generator" if annotation is torch.Generator else None
    return opaque_object.get_opaque_type_name(annotation)


def readable(text: str) -> str:
    """The text of a schema that PyTorch printed, with types that the parser reads.

    PyTorch prints the same type for all custom classes, and that name is not one that it reads.
    """
    if "PyObject" not in text:
        return text
    return re.sub(r"\bPyObject\b", _custom_class(), text)


@functools.cache
def _custom_class() -> str:
    name = "torchop.Object"
    torch._C._register_opaque_type(name)
    return name


def is_returnable_custom_class(annotation: Any) -> bool:
    """Whether PyTorch allows a registered custom class as a return type."""
    # Renamed between 2.13 ("reference") and 2.15 ("symbolic").
    check = getattr(opaque_object, "is_opaque_symbolic_type", None) or getattr(
        opaque_object, "is_opaque_reference_type", None
    )
    return isinstance(annotation, type) and check is not None and bool(check(annotation))


def is_group_name(annotation: Any) -> bool:
    """Whether `annotation` is torch.distributed's GroupName, a NewType of str."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    return module is not None and annotation is getattr(module, "GroupName", object())
