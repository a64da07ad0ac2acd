"""Default values: how a schema writes them, and how a kernel comes to see the schema's."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchop._compat import dispatch
from torchop._errors import SchemaError
from torchop._schema.schema import Argument, Schema

# The parser reads fewer escapes than Python writes: NUL and carriage return have to be octal.
_ESCAPES = {
    "\\": "\\\\",
    '"': '\\"',
    "\n": "\\n",
    "\t": "\\t",
    "\r": "\\015",
    "\0": "\\000",
}


def render(value: Any, schema_type: str) -> str:
    """Writes a default for the schema parser.

    Args:
        value: what the function declares.
        schema_type: the schema type of the parameter, such as `SymInt` or `float[]?`.

    Raises:
        SchemaError: the value does not belong to the type, or the parser cannot read it.
    """
    if value is None:
        return "None"
    base = schema_type.removesuffix("?")
    if base.endswith("[]"):
        if schema_type.endswith("?"):
            raise SchemaError("an optional list can only default to None")
        item = base.removesuffix("[]").removesuffix("?")
        if not isinstance(value, (list, tuple)) or item not in _LISTED:
            raise SchemaError("a schema can hold lists of int, float or bool as a default, or None")
        return "[" + ", ".join(_RENDERERS[item](entry) for entry in value) + "]"
    renderer = _RENDERERS.get(base)
    if renderer is None:
        raise SchemaError(f"a schema has no way to write a default of type {base}")
    return renderer(value)


def _integer(value: Any) -> str:
    if not isinstance(value, int):
        raise SchemaError("expected an int")
    if not -(2**63) <= value < 2**63:
        raise SchemaError("expected an int of 64 bits")
    return str(int(value))


def _float(value: Any) -> str:
    if not isinstance(value, (int, float)):
        raise SchemaError("expected a float")
    try:
        value = float(value)
    except OverflowError:
        raise SchemaError("expected a float of 64 bits") from None
    if not math.isfinite(value):
        raise SchemaError(
            "a schema cannot write inf or nan; default to None, and replace it inside"
        )
    if 0 < abs(value) < sys.float_info.min:
        # The parser takes the underflow for an error, and says no more than "stod".
        raise SchemaError(f"a schema cannot write a float smaller than {sys.float_info.min}")
    return repr(value)


def _boolean(value: Any) -> str:
    if not isinstance(value, bool):
        raise SchemaError("expected a bool")
    return str(value)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    return _integer(value) if isinstance(value, int) else _float(value)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise SchemaError("expected a str")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise SchemaError("a schema is UTF-8, which has no lone surrogates")
    return '"' + "".join(_ESCAPES.get(char, char) for char in value) + '"'


def _dtype(value: Any) -> str:
    if not isinstance(value, torch.dtype):
        raise SchemaError("expected a torch.dtype")
    return str(value).removeprefix("torch.")


def _device(value: Any) -> str:
    try:
        return f'"{dispatch.device(value)}"'
    except (RuntimeError, TypeError):
        raise SchemaError("expected a torch.device") from None


_RENDERERS: dict[str, Callable[[Any], str]] = {
    "SymInt": _integer,
    "float": _float,
    "bool": _boolean,
    "Scalar": _number,
    "str": _string,
    "ScalarType": _dtype,
    "Device": _device,
}
_LISTED = ("SymInt", "float", "bool")


def bind(function: Callable[..., Any], schema: Schema, leading: int = 0) -> Callable[..., Any]:
    """Makes `function` see the schema's defaults.

    The dispatcher drops arguments that equal their default before it calls a Python kernel, which
    then sees the default of its own signature. That may be another one, now or later: a function
    may say by `__wrapped__` that it has the signature of another, its defaults can be replaced, and
    a default that is a list is one list for all calls. So the schema's is always passed.

    Args:
        function: a kernel or rule with the parameters of the operator.
        schema: the schema that the caller saw.
        leading: how many parameters of `function` come before those of the operator.
    """
    if not schema.has_defaults:
        return function

    def with_schema_defaults(*args: Any, **kwargs: Any) -> Any:
        filled, keywords = schema.fill_defaults(args[leading:], kwargs)
        return function(*args[:leading], *filled, **keywords)

    with_schema_defaults.__wrapped__ = function  # type: ignore[attr-defined]
    return with_schema_defaults


def same_default(default: Any, argument: Argument) -> bool:
    """Whether a Python default means what the schema's default means."""
    if default is inspect.Parameter.empty:
        return False
    if argument.default is None or default is None:
        return argument.default is default
    if isinstance(argument.default, torch.device):
        try:
            return bool(dispatch.device(default) == argument.default)
        except (RuntimeError, TypeError):
            return False
    if isinstance(argument.default, list):
        if not isinstance(default, (list, tuple)):
            return False
        default = list(default)
    try:
        return bool(default == argument.default)
    except (RuntimeError, ValueError):  # tensors and arrays compare item by item
        return False
