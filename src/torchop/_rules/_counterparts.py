"""Counterparts: operators that stand for another one in compiled graphs.

A counterpart calls the operator that it stands for, and lives as long. Its schema differs where
PyTorch's functionalization, or Inductor, cannot take that operator's:

- `name__mutable` mutates the same arguments, gets lists without None and beside each of them where
  the tensors belong, and does not return what it was given.
- `name__functional` mutates nothing, and returns what it would have written, after the results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop import _compat
from torchop._contract import tensors_in
from torchop._definition import Definition
from torchop._naming import OpName
from torchop._schema.forms import Form
from torchop._schema.schema import Argument, Schema

MUTABLE = "mutable"
FUNCTIONAL = "functional"

Call = tuple[tuple[Any, ...], dict[str, Any]]


class Counterpart:
    """An operator that stands for another, and how to call it."""

    __slots__ = ("arguments", "name")

    def __init__(self, name: OpName, arguments: Callable[[Sequence[Any], Mapping[str, Any]], Call]):
        self.name = name
        # From the arguments of a call of the operator to those of its counterpart.
        self.arguments = arguments

    @property
    def overload(self) -> _compat.OpOverload:
        """The counterpart under `torch.ops`."""
        return _compat.lookup_overload(*self.name)


def define(definition: Definition, kind: str) -> Counterpart:
    """Defines a counterpart in the library of the operator, whose schema the dispatcher knows.

    Args:
        definition: the operator.
        kind: `MUTABLE` or `FUNCTIONAL`.
    """
    schema, library = definition.schema, definition.library
    name = definition.name._replace(name=f"{definition.name.name}__{kind}")
    if kind == MUTABLE:
        text, kernel, arguments = _mutable(definition)
    else:
        text, kernel, arguments = _functional(definition)
    tags = [tag for tag in definition.tags if tag not in _compat.FORM_TAGS]
    _compat.define(library, name.local + text, tags)
    _compat.refresh_packet(name.namespace, name.name)
    _compat.implement(library, name.local, _compat.kernel_key("default"), kernel)
    # On fake tensors it calls the operator, whose fake kernel describes the results.
    _compat.on_close(library, _compat.push_fake(str(name), kernel, schema.text))
    return Counterpart(name, arguments)


def original(name: OpName) -> OpName:
    """The operator that a counterpart stands for; any other name is returned as it is."""
    stem, _, kind = name.name.rpartition("__")
    return name._replace(name=stem) if stem and kind in (MUTABLE, FUNCTIONAL) else name


def lists_with_none(schema: Schema) -> tuple[Argument, ...]:
    """The arguments of a schema that are mutated lists in which tensors may be missing."""
    return tuple(a for a in schema.arguments if a.is_mutated and "List[Optional[" in a.kind)


def _mutable(definition: Definition) -> tuple[str, Callable[..., Any], Any]:
    schema = definition.schema
    lists = [a.name for a in lists_with_none(schema)]
    arguments, result = _parts(schema.written)
    # The last of them are by keyword only, so that no default is followed by an argument without.
    given = [f"bool[]? {name}_given" for name in lists]
    if given:
        arguments = [_LIST_WITH_NONE.sub(r"Tensor\1[]", argument) for argument in arguments]
        arguments += given if "*" in arguments else ["*", *given]
    text = f"({', '.join(arguments)}) -> {'()' if schema.form is not Form.PLAIN else result}"

    @_compat.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        masks = {name: kwargs.pop(f"{name}_given") for name in lists}
        args, kwargs = _mapped(schema, args, kwargs, masks, _spread)
        returned = definition.overload(*args, **kwargs)
        return returned if schema.form is Form.PLAIN else None

    def without_none(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        masks: dict[str, Any] = {}

        def note(value: Any, name: str) -> Any:
            masks[f"{name}_given"] = None if value is None else [t is not None for t in value]
            return None if value is None else [t for t in value if t is not None]

        args, kwargs = schema.fill_defaults(args, kwargs)
        args, kwargs = _mapped(schema, args, kwargs, {name: name for name in lists}, note)
        return args, {**kwargs, **masks}

    return text, kernel, without_none


def _spread(tensors: Any, given: list[bool] | None) -> list[Tensor | None] | None:
    if given is None:
        return None
    remaining = iter(tensors)
    return [next(remaining) if is_given else None for is_given in given]


def _functional(definition: Definition) -> tuple[str, Callable[..., Any], Any]:
    schema = definition.schema
    arguments, result = _parts(schema.written)
    arguments = [_WRITE.sub("Tensor", argument) for argument in arguments]
    results = result.removeprefix("(").removesuffix(")") if result.startswith("(") else result
    text = f"({', '.join(arguments)}) -> ({results}, Tensor[])"
    mutated = dict.fromkeys(schema.mutated)

    @_compat.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        written: list[Tensor] = []

        def copied(value: Any, _: None) -> Any:
            if isinstance(value, (list, tuple)):
                return [copied(item, None) for item in value]
            if value is None:
                return None
            written.append(_copy(value))
            return written[-1]

        args, kwargs = schema.fill_defaults(args, kwargs)
        args, kwargs = _mapped(schema, args, kwargs, mutated, copied)
        returned = definition.overload(*args, **kwargs)
        return (*(returned if len(schema.returns) > 1 else (returned,)), written)

    return text, kernel, schema.fill_defaults


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the strides of the tensor, which a clone of a slice does not have."""
    copy = torch.empty_strided(
        tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    return copy.copy_(tensor)


def _mapped(
    schema: Schema,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    extra: Mapping[str, Any],
    change: Callable[[Any, Any], Any],
) -> Call:
    """The arguments, those named in `extra` replaced by `change(value, extra[name])`."""
    positional = tuple(
        change(value, extra[a.name]) if a.name in extra else value
        for a, value in zip(schema.positional, args, strict=False)
    )
    keywords = {
        name: change(value, extra[name]) if name in extra else value
        for name, value in kwargs.items()
    }
    return positional, keywords


# --------------------------------------------------------------------------------------------------
# The text of a schema. PyTorch prints an argument, but with other escapes than its parser reads.

_WRITE = re.compile(r"Tensor\(\w+!\)")
_LIST_WITH_NONE = re.compile(r"Tensor(\(\w+!\))\?\[\d*\]")


def _parts(schema: str) -> tuple[list[str], str]:
    """The arguments of a schema, with `*` among them, and what stands behind the arrow."""
    start = schema.index("(")
    pieces, last = [], start + 1
    for position, character, depth in _outside_strings(schema, start):
        if (depth, character) in ((1, ","), (0, ")")):
            pieces.append(schema[last:position].strip())
            last = position + 1
            if depth == 0:
                break
    return [piece for piece in pieces if piece], schema[last:].partition("->")[2].strip()


def _outside_strings(text: str, start: int) -> Iterator[tuple[int, str, int]]:
    """The characters outside string literals, and how many brackets are open after each."""
    depth, quote, escaped = 0, "", False
    for position in range(start, len(text)):
        character = text[position]
        if quote:
            if character == quote and not escaped:
                quote = ""
            escaped = character == "\\" and not escaped
            continue
        if character in "\"'":
            quote = character
            continue
        depth += (character in "([") - (character in ")]")
        yield position, character, depth
