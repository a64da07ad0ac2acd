"""Derives a structure from a function whose annotations say more than a schema can."""

from __future__ import annotations

import collections.abc
import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from torchop._compat.classes import Tag
from torchop._errors import SchemaError
from torchop._schema import signatures, types
from torchop._schema.forms import form_of, infer_return
from torchop._schema.infer import mutated_names
from torchop._schema.structure.build import Builder, UnsupportedTypeError, build_result
from torchop._schema.structure.kinds import leaf_kind
from torchop._schema.structure.nodes import Leaf, Node
from torchop._schema.structure.source import is_plain
from torchop._schema.structure.structure import Parameter, Structure
from torchop._schema.text import write_results


def derive_structure(
    op: str, function: Callable[..., Any], mutates_args: str | Iterable[str], tags: tuple[Tag, ...]
) -> Structure | None:
    """The structure of a function whose annotations say more than a schema can; otherwise None."""
    signature = signatures.signature(function)
    if not _is_rich(signature):
        return None
    where = signatures.spell_function(function)
    builder = Builder(op)
    parameters = [_parameter(builder, where, p) for p in signature.parameters.values()]
    leaves = [leaf for parameter in parameters for leaf in parameter.node.leaves()]
    _check_names(op, leaves)
    mutated = _mutated(op, leaves, mutated_names(mutates_args))
    if infer_return(form_of(tags), where, signature, mutated) is None:
        result, returns = _result(op, where, signature)
    else:
        result, returns = None, None  # what is written
    return Structure(op, function, parameters, result, returns, mutated)


def _is_rich(signature: inspect.Signature) -> bool:
    parameters = signature.parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    if signature.return_annotation is signature.empty or any(
        p.kind in variadic or p.annotation is p.empty for p in parameters
    ):
        return False
    return (
        any(p.kind is p.POSITIONAL_ONLY or _is_rich_type(p.annotation) for p in parameters)
        or types.return_type(signature.return_annotation) is None
    )


def _is_rich_type(annotation: Any) -> bool:
    if types.argument_type(annotation) is None:
        return True
    kind = leaf_kind(annotation)
    return kind is not None and kind.decode is not None  # an Enum, or an opaque class


def _parameter(builder: Builder, where: str, declared: inspect.Parameter) -> Parameter:
    name = declared.name
    if not is_plain(name):
        raise SchemaError(
            f"{where}: the parameter {name!r} has a name that a schema cannot hold; use ASCII "
            "letters, digits and underscores, and no keyword of Python."
        )
    try:
        node = builder.build(declared.annotation, name, declared.default)
    except UnsupportedTypeError as error:
        place = "" if error.path == name else f" at {error.path!r}"
        raise SchemaError(
            f"{where}: parameter {name!r} has unsupported type {types.spell(error.annotation)}"
            f"{place}; {types.instead(error.annotation, _nearest(error.annotation))}."
        ) from None
    except TypeError as error:  # an ArgumentError, about a default
        raise SchemaError(
            f"{where}: parameter {name!r} has an unsupported default: {error}"
        ) from None
    keyword_only = declared.kind is declared.KEYWORD_ONLY
    if keyword_only and node.holds_tensors and not isinstance(node, Leaf):
        raise NotImplementedError(
            f"{builder.op}: custom_op with kwarg-only Tensor args ({name}, which holds tensors): "
            "they could have no gradient. Move it before the '*'."
        )
    return Parameter(declared, node)


def _nearest(annotation: Any) -> str:
    """What to write instead, where structures are more than a schema can express."""
    inner, _ = types.strip_optional(annotation)
    origin, items = typing.get_origin(inner), typing.get_args(inner)
    if origin is tuple and Ellipsis not in items and any(item != items[0] for item in items):
        return "a NamedTuple"
    if (origin or inner) in (dict, collections.abc.Mapping):
        named = "a TypedDict or a dataclass"
        return named if Tensor in items else f"a dict[str, float] or the like, {named}"
    if origin is not None and len(items) == 1 and types.has_fields(items[0]):
        return "a dataclass of lists"
    return types.nearest(annotation)


def _check_names(op: str, leaves: Sequence[Leaf]) -> None:
    places: dict[str, Leaf] = {}
    for leaf in leaves:
        other = places.setdefault(leaf.name, leaf)
        if other is not leaf:
            raise SchemaError(
                f"{op}: {other.path!r} and {leaf.path!r} would both be the argument {leaf.name!r} "
                "of the schema. Give one of them another name."
            )


def _mutated(op: str, leaves: Sequence[Leaf], names: tuple[str, ...] | None) -> tuple[str, ...]:
    """The flat arguments that `mutates_args` means: a tensor, or all those of a structure."""
    tensors = {leaf.path: leaf.name for leaf in leaves if leaf.is_tensor}
    if names is None:
        return tuple(tensors.values())
    flat_names = []
    for name in names:
        inside = [flat for path, flat in tensors.items() if f"{path}.".startswith(f"{name}.")]
        if not inside:
            raise SchemaError(
                f"{op}: mutates_args names {name!r}, which is not a tensor and contains none; the "
                f"tensors are {', '.join(tensors) or 'none'}."
            )
        flat_names += inside
    return tuple(dict.fromkeys(flat_names))


def _result(op: str, where: str, signature: inspect.Signature) -> tuple[Node | None, str]:
    annotation = signature.return_annotation
    flat = types.return_type(annotation)
    if flat is not None:
        return None, flat
    try:
        result = build_result(op, annotation)
    except UnsupportedTypeError as error:
        raise SchemaError(
            f"{where}: return has unsupported type {types.spell(error.annotation)}; supported are "
            f"{types.RETURNABLE}, Optional[Tensor], and a NamedTuple or dataclass of these."
        ) from None
    return result, write_results([leaf.kind.schema for leaf in result.leaves() if leaf.is_tensor])
