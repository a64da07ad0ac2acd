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

# PyTorch's schema parser has no escapes for carriage return and NUL, so write these in octal.
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t", "\r": "\\015", "\0": "\\000"}


def render(value: Any, schema_type: str) -> str:
    """Write a default value in schema syntax, given its schema type, such as `float[]?`."""
    if value is None:
        return "None"
    base = schema_type.removesuffix("?")
    if base.endswith("[]"):
        if schema_type.endswith("?"):
            raise SchemaError("an optional list can only default to None")
        item = base.removesuffix("[]").removesuffix("?")
        if not isinstance(value, (list, tuple)) or item not in _LISTED:
            raise SchemaError("a list default must be a list of int, float or bool, or None")
        return f"[{', '.join(_render_single(entry, item) for entry in value)}]"
    if base not in _RENDERERS:
        raise SchemaError(
            f"a schema cannot hold a default of type {base}; use the default None, and create the "
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
        # PyTorch's parser would reject a subnormal number with an error that just says "stod".
        raise SchemaError(f"a schema cannot write a float smaller than {sys.float_info.min}")
    return repr(value)


def _number(value: float) -> str:
    if isinstance(value, bool):
        return str(value)
    return _integer(value) if isinstance(value, int) else _float(value)


def _string(value: str) -> str:
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise SchemaError("a schema is UTF-8, so a str default cannot hold lone surrogates")
    return '"' + "".join(_ESCAPES.get(char, char) for char in value) + '"'


def _device(value: Any) -> str:
    try:
        return f'"{dispatch.device(value)}"'
    except (RuntimeError, TypeError):
        raise SchemaError("expected a torch.device") from None


_NUMBERS = (int, float)
# For each schema type, a tuple of the classes that a default may have, the name of these classes in
# error messages, and a function that writes the default in schema syntax.
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
    """Wrap a Python kernel so that it always uses the defaults from the schema.

    The dispatcher drops arguments that equal the schema's default before it calls a Python kernel,
    so the kernel would use the default in its own signature instead. That default can differ, for
    example if somebody changed `__defaults__`, or if an earlier call modified a default list in
    place.

    The first `leading` parameters of `function` are passed through, because they are not arguments
    of the operator.
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
    """Return `function`, wrapped if necessary so that it accepts every argument of the operator.

    Authors may leave out trailing parameters that have a default in the schema, because the
    dispatcher does not pass arguments that equal their default. If a call does pass another value
    for such a parameter, the wrapper raises an error. `leading` names the parameters that come
    before the operator's arguments.
    """
    check_callable(what, function)
    positional, keywords = schema.parameters
    if accepts(function, (*leading, *positional), keywords):
        return function
    count, keyword_names = _accepted(what, function, schema, leading)
    place = len(leading) + count

    def complete(*args: Any, **kwargs: Any) -> Any:
        values = dict(zip(positional[count:], args[place:], strict=False)) | kwargs
        for argument in schema.arguments:
            name = argument.name
            if name not in values or name in keyword_names:
                continue
            value = values[name]
            # A symbolic value, such as a SymInt, never counts as equal to the default, because the
            # dispatcher passes symbolic values to kernels even if they equal the default.
            if isinstance(value, _SYMBOLIC) or not same_default(value, argument):
                raise RuleSignatureError(
                    f"{what} does not take the parameter {name!r}, but this call passes a value "
                    f"other than the default {short_repr(argument.default)}. Add the parameter "
                    f"{name!r} to {spell_function(function)}."
                )
        return function(*args[:place], **{k: v for k, v in kwargs.items() if k in keyword_names})

    complete.__wrapped__ = function  # type: ignore[attr-defined]
    return complete


def _accepted(
    what: str, function: Callable[..., Any], schema: Schema, leading: tuple[str, ...]
) -> tuple[int, frozenset[str]]:
    positional, keywords = schema.parameters
    names = inspect.signature(function).parameters
    accepted = [a.name for a in schema.keyword_only if not a.has_default or a.name in names]
    required = [a for a in schema.positional if not a.has_default]
    for count in range(len(positional), len(required) - 1, -1):
        if accepts(function, (*leading, *positional[:count]), accepted):
            return count, frozenset(accepted)
    check_signature(what, function, (*leading, *positional), keywords)
    raise AssertionError  # unreachable: check_signature raises


_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


def same_default(default: Any, argument: Argument) -> bool:
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
    except (RuntimeError, ValueError):  # comparing tensors or arrays does not yield a bool
        return False
