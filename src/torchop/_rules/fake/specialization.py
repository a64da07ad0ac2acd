"""Warn about `int` arguments that make `torch.compile` recompile for each new value.

This happens if a program passes a symbolic size, but the schema declares the argument as `int`
instead of `SymInt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchop._compat import compilers
from torchop._core.call import values_by_name
from torchop._core.definition import Definition
from torchop._errors import SchemaWarning, warn


def symbolic_arguments(definition: Definition, names: tuple[str, ...]) -> list[str]:
    call = compilers.call_traced_by_dynamo(definition.overload)
    values = {} if call is None else values_by_name(definition.schema, *call)
    return [name for name in names if _is_symbolic(values.get(name))]


def warn_of_guards(definition: Definition, names: Sequence[str]) -> None:
    for name in names:
        kind = definition.schema.written_types[name]
        warn(
            f"{definition}: argument {name!r} depends on a size, but the schema declares it as "
            f"{kind}, so the program is recompiled for each value. Write "
            f"{kind.replace('int', 'SymInt', 1)} {name} in the schema. If the kernel needs a "
            "constant, ignore this torchop.SchemaWarning with warnings.filterwarnings.",
            SchemaWarning,
        )


def _is_symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_is_symbolic, value))
    return isinstance(value, torch.SymInt)
