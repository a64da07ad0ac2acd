"""Default values: how a schema writes them, and how a kernel comes to see the schema's."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable
from typing import Any

import torch

from torchop._compat import dispatch
from torchop._errors import RuleSignatureError, SchemaError, short_repr
from torchop._schema.callables import accepts, check_callable, check_signature
from torchop._schema.schema import Argument, Schema
from torchop._schema.signatures import spell_function

# The parser reads fewer escapes than Python writes: NUL and carriage return have to be octal.
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\015", "\0": "\\000"}


def render(value: Any, schema_type: str) -> str:
    """Writes a default of a schema type, such as `SymInt` or `float[]?`, for the schema parser."""
    if value is None:
        return "None"
    base = schema_type.removesuffix("?")
    if base.endswith("[]"):
        if schema_type.endswith("?"):
            raise SchemaError("an optional list can only default to None")
        item = base.removesuffix("[]").removesuffix("?")
        if not isinstance(value, (list, tuple)) or item not in _LISTED:
            raise SchemaError("a schema can hold lists of int, float or bool as a default, or None")
        return f"[{', '.join(_render_single(entry, item) for entry in value)}]"
    if base not in _RENDERERS:
        raise SchemaError(
            f"a schema cannot hold a default of type {base}; use the default None, and make the "
            "value in the function"
        )
    return _render_single(value, base)


def _render_single(value: Any, schema_type: str) -> str:
    classes, expected, write = _RENDERERS[schema_type]
    if not isinstance(value, classes):
        raise SchemaError(f"expected {expected}")
    return write(value)


def _integer(value: int) -> str:
    if not -(2**63) <= value < 2**63:
        raise SchemaError("expected an int of 64 bits")
    return str(int(value))


def _float(value: float) -> str:
    try:
        value = float(value)
    except OverflowError:
        raise SchemaError("expected a float of 64 bits") from None
    if not math.isfinite(value):
        raise SchemaError(
            "a schema cannot hold inf or nan; use the default None, and replace it in the function"
        )
    if 0 < abs(value) < sys.float_info.min:
        # The parser takes the underflow for an error, and says no more than "stod".
        raise SchemaError(f"a schema cannot write a float smaller than {sys.float_info.min}")
    return repr(value)


def _number(value: float) -> str:
    if isinstance(value, bool):
        return str(value)
    return _integer(value) if isinstance(value, int) else _float(value)


def _string(value: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise SchemaError("a schema is UTF-8, which has no lone surrogates")
    return '"' + "".join(_ESCAPES.get(char, char) for char in value) + '"'


def _device(value: Any) -> str:
    try:
        return f'"{dispatch.device(value)}"'
    except (RuntimeError, TypeError):
        raise SchemaError("expected a torch.device") from None


_NUMBERS = (int, float)
# By schema type: the classes of its defaults, in words too, and what writes one.
_RENDERERS: dict[str, tuple[type | tuple[type, ...], str, Callable[[Any], str]]] = {
    "SymInt": (int, "an int", _integer),
    "float": (_NUMBERS, "a float", _float),
    "bool": (bool, "a bool", str),
    "Scalar": (_NUMBERS, "a float", _number),
    "str": (str, "a str", _string),
    "ScalarType": (torch.dtype, "a torch.dtype", lambda dtype: str(dtype).removeprefix("torch.")),
    "Device": (object, "a torch.device", _device),
}
_LISTED = ("SymInt", "float", "bool")


def bind(function: Callable[..., Any], schema: Schema, leading: int = 0) -> Callable[..., Any]:
    """Makes `function` see the schema's defaults.

    The dispatcher drops arguments that equal their default before it calls a Python kernel, which
    then sees the default of its own signature. That may be another one, now or later: a function
    may say by `__wrapped__` that it has the signature of another, its defaults can be replaced, and
    a default that is a list is one list for all calls. So the schema's is always passed.
    `leading` parameters of `function` come before those of the operator.
    """
    if not schema.has_defaults:
        return function

    def with_schema_defaults(*args: Any, **kwargs: Any) -> Any:
        filled, keywords = schema.fill_defaults(args[leading:], kwargs)
        return function(*args[:leading], *filled, **keywords)

    with_schema_defaults.__wrapped__ = function  # type: ignore[attr-defined]
    return with_schema_defaults


def fitted(
    what: str, function: Callable[..., Any], schema: Schema, leading: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Makes a function one that takes `leading` and every argument of the operator.

    It may leave out trailing parameters that have a default in the schema: the dispatcher does not
    pass a trailing argument that equals its default, so only a call with another value needs them.
    """
    check_callable(what, function)
    positional, keywords = schema.parameters
    if accepts(function, (*leading, *positional), keywords):
        return function
    count, kept = _taken(what, function, schema, leading)
    place = len(leading) + count

    def complete(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(positional[count:], args[place:], strict=False)) | kwargs
        for argument in schema.arguments:
            name = argument.name
            if name not in values or name in kept:
                continue
            value = values[name]
            # The dispatcher passes what is symbolic, without looking at its value.
            if isinstance(value, _SYMBOLIC) or not same_default(value, argument):
                raise RuleSignatureError(
                    f"{what} does not take the parameter {name!r}, and this call passes it with "
                    f"another value than its default, {short_repr(argument.default)}. Give "
                    f"{spell_function(function)} the parameter {name!r}."
                )
        return function(*args[:place], **{k: v for k, v in kwargs.items() if k in kept})

    complete.__wrapped__ = function  # type: ignore[attr-defined]
    return complete


def _taken(
    what: str, function: Callable[..., Any], schema: Schema, leading: tuple[str, ...]
) -> tuple[int, frozenset[str]]:
    """How many arguments a function takes by position, and which keywords."""
    positional, keywords = schema.parameters
    names = inspect.signature(function).parameters
    kept = [a.name for a in schema.keyword_only if not a.has_default or a.name in names]
    required = [a for a in schema.positional if not a.has_default]
    for count in range(len(positional), len(required) - 1, -1):
        if accepts(function, (*leading, *positional[:count]), kept):
            return count, frozenset(kept)
    check_signature(what, function, (*leading, *positional), keywords)
    raise AssertionError  # it has raised


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def same_default(default: Any, argument: Argument) -> bool:
    """Whether a Python default means what the schema's default means."""
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
