"""The arguments that the dispatcher passes: without those that equal their default.

Before the dispatcher calls a Python kernel, it drops arguments that equal the schema's default: at
the end of the positional ones, and anywhere among the keyword-only ones. The kernel then uses the
default of its own signature. Native calls drop arguments in C++; this module does it for formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torchop._schema.schema import Argument, Schema

# Nobody can tell two equal values of these types apart.
_SIMPLE = (type(None), int, float, bool, str, torch.dtype, torch.layout, torch.memory_format)


def count_passed(args: Sequence[Any], schema: Schema) -> int:
    """How many of all positional arguments the dispatcher would pass."""
    end = len(args)
    while end > 0 and _is_dropped(args[end - 1], schema.positional[end - 1], schema):
        end -= 1
    return end


def as_filled(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], schema: Schema
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that torch.library passes to `setup_context`.

    It fills in the defaults that the dispatcher dropped, as the schema stores them: a dtype as a
    number.
    """
    kept = schema.kept_defaults
    passed = count_passed(args, schema)
    filled = (*args[:passed], *(kept[a.name] for a in schema.positional[passed:]))
    return filled, {
        a.name: kept[a.name] if _is_dropped(kwargs[a.name], a, schema) else kwargs[a.name]
        for a in schema.keyword_only
    }


def has_simple_defaults(schema: Schema) -> bool:
    """Whether a schema stores each default as Python does, so that `==` tells what is dropped."""
    return all(
        type(kept) in _SIMPLE and kept == argument.default
        for argument in schema.arguments
        if argument.has_default
        for kept in [schema.kept_defaults[argument.name]]
    )


def _is_dropped(value: Any, argument: Argument, schema: Schema) -> bool:
    if not argument.has_default:
        return False
    if value is argument.default:
        return True
    # Such a default is a str to the dispatcher, which no device equals.
    return argument.name not in schema.spelled_devices and _is_equal(value, argument.default)


def _is_equal(value: Any, default: Any) -> bool:
    if type(value) is not type(default):
        return False
    if isinstance(value, list):
        return len(value) == len(default) and all(map(_is_equal, value, default))
    return not isinstance(value, torch.Tensor) and bool(value == default)
