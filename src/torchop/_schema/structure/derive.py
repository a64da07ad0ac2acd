"""Derives a structure from a function whose annotations say more than a schema can."""

from __future__ import annotations

import collections.abc
import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from torchop._compat import schemas
from torchop._compat.classes import Tag
from torchop._errors import SchemaError
from torchop._schema import signatures, types
from torchop._schema.forms import form_of, infer_return
from torchop._schema.infer import mutated_names
from torchop._schema.structure import kinds
from torchop._schema.structure.kinds import (
    KINDS,
    Kind,
    leaf_kind,
    read_container,
    without_annotated,
)
from torchop._schema.structure.nodes import Fields, Leaf, Maybe, Node, Pair, Several, result_leaf
from torchop._schema.structure.shapes import MISSING, argument_shape, result_shape
from torchop._schema.structure.source import is_plain
from torchop._schema.structure.structure import Parameter, Structure
from torchop._schema.text import write_results

# How messages name the whole result.
_RESULT = "the result"


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
    mutated = _mutated(op, leaves, mutated_names(op, mutates_args))
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
        named = "a dataclass"
        return named if torch.Tensor in items else f"a dict[str, float] or the like, or {named}"
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
        place = "" if error.path == _RESULT else f" at {error.path!r}"
        raise SchemaError(
            f"{where}: return has unsupported type {types.spell(error.annotation)}{place}; "
            f"supported are {types.RETURNABLE}, Optional[Tensor], and a NamedTuple or dataclass of "
            "tensors."
        ) from None
    return result, write_results([leaf.kind.schema for leaf in result.leaves()])


# --------------------------------------------------------------------------------------------------
# The tree of an argument, and that of a result


class UnsupportedTypeError(Exception):
    """An annotation, at a path, that no tree can stand for."""

    def __init__(self, path: str, annotation: Any) -> None:
        super().__init__(path)
        self.path = path
        self.annotation = annotation


class Builder:
    """Builds the trees of one signature; `op` is the name of the operator, for messages."""

    def __init__(self, op: str) -> None:
        self.op = op

    def build(
        self, annotation: Any, path: str, default: Any = MISSING, inside: tuple[Any, ...] = ()
    ) -> Node:
        """The tree of an argument, or of a part such as `cfg.scale` inside other structures."""
        annotation = without_annotated(annotation)
        leaf = self._leaf(annotation, path, default)
        if leaf is not None:
            return leaf
        inner, optional = types.strip_optional(annotation)
        if optional:
            return self._maybe(inner, path, default, inside)
        node = self._fields(annotation, path, default, inside) or self._pair(
            annotation, path, default
        )
        if node is None:
            raise UnsupportedTypeError(path, annotation)
        return node

    def _leaf(self, annotation: Any, path: str, default: Any) -> Leaf | None:
        kind = leaf_kind(annotation)
        schema_type = types.argument_type(annotation)
        if kind is not None:
            # The dispatcher checks an argument that is of a schema type as it is.
            checked = "." in path or kind.decode is not None or schema_type is None
        elif schema_type is not None:
            checked = False
            schema, is_optional = schema_type.removesuffix("?"), schema_type.endswith("?")
            kind = Kind(schema, kinds.unchanged, is_optional=is_optional)
        else:
            return None
        return Leaf(self.op, path, self._name(path), kind, default, checked=checked)

    def _name(self, path: str) -> str:
        name = path.replace(".", "_")
        if not is_plain(name) or not schemas.is_identifier(name):
            raise SchemaError(
                f"{self.op}: {path!r} would be the argument {name!r} of the schema, which cannot "
                "hold this name; use ASCII letters, digits and underscores, and no keyword of "
                "TorchScript."
            )
        return name

    def _maybe(self, inner: Any, path: str, default: Any, inside: tuple[Any, ...]) -> Maybe:
        node = self.build(inner, path, MISSING if default is None else default, inside)
        name = self._name(f"{path}.given")
        flag = Leaf(self.op, path, name, KINDS[bool], MISSING, checked=False)
        return Maybe(self.op, flag, node, default)

    def _fields(
        self, annotation: Any, path: str, default: Any, inside: tuple[Any, ...]
    ) -> Fields | None:
        shape = argument_shape(annotation)
        if shape is None:
            return None
        _check_end(f"{self.op}: {path}", annotation, inside, "Pass")
        spelled = types.spell(annotation)
        if default is None:
            raise SchemaError(
                f"{self.op}: {path} defaults to None; annotate it as Optional[{spelled}]."
            )
        defaults: Mapping[str, Any] | None = {n: f.default for n, f in shape.fields.items()}
        if default is not MISSING:
            defaults = shape.parts(default)
        if defaults is None:
            raise SchemaError(
                f"{self.op}: {path} has a default of type {types.spell(type(default))}; expected "
                f"{spelled}."
            )
        nodes: dict[str, Node] = {}
        for name, field in shape.fields.items():
            place = f"{path}.{name}", defaults.get(name, MISSING)
            nodes[name] = self.build(field.annotation, *place, (*inside, annotation))
        return Fields(self.op, path, nodes, shape)

    def _pair(self, annotation: Any, path: str, default: Any) -> Pair | None:
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        convert: Callable[[Kind], Any]
        if origin in (dict, _Mapping) and args and args[0] is str:
            item, names, convert = leaf_kind(args[1]), ("keys", "values"), kinds.mapping
        else:
            outer = read_container(annotation)
            inner = None if outer is None else read_container(outer.item)
            if outer is None or inner is None:
                return None
            item, names = leaf_kind(inner.item), ("values", "lengths")
            convert = functools.partial(kinds.nested, outer, inner)
        # A schema has no lists of other types, and of optional items only some.
        if item is None or item.is_optional or item.decode or item.schema not in _LISTED:
            return None
        encode, decode = convert(item)
        items = {"values": item, "keys": KINDS[str], "lengths": KINDS[int]}
        flat: tuple[Any, Any] = (MISSING, MISSING)
        if default is not MISSING:
            flat = encode(default, f"{self.op}: {path}: the default")

        def leaf(name: str, value: Any) -> Leaf:
            place = f"{path}.{name}"
            return Leaf(self.op, place, self._name(place), kinds.list_of(items[name]), value)

        first, second = map(leaf, names, flat)
        return Pair(self.op, path, (first, second), encode, decode)


def build_result(
    op: str, annotation: Any, path: str = _RESULT, inside: tuple[Any, ...] = ()
) -> Node:
    """The tree of a result, or of a part of one that is inside other structures.

    A leaf is what a flat schema can say of tensors: one that may be missing, or several in a list
    or tuple.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    inner, optional = types.strip_optional(annotation)
    if inner is torch.Tensor:
        return result_leaf(op, path, "Tensor?" if optional else "Tensor")
    if origin is list and args == (torch.Tensor,):
        return result_leaf(op, path, "Tensor[]")
    if origin is tuple and args == (torch.Tensor, Ellipsis):
        return result_leaf(op, path, "Tensor[]", lambda tensors, where: tuple(tensors))
    shape = result_shape(annotation)
    if shape is None:
        raise UnsupportedTypeError(path, annotation)
    _check_end(f"{op}: {path}", annotation, inside, "Return")
    nodes = {}
    for name, field in shape.fields.items():
        # An f-string would call the `__format__` of a name, by which two fields may look like one.
        place = f"{path}[{name}]" if origin is tuple else ".".join((path, name))
        nodes[name] = build_result(op, field.annotation, place, (*inside, annotation))
    return Several(op, path, nodes, shape)


def _check_end(where: str, annotation: Any, inside: tuple[Any, ...], verb: str) -> None:
    """Refuses a structure that contains itself."""
    if annotation in inside:
        spelled = types.spell(annotation)
        raise SchemaError(
            f"{where} is a {spelled} inside a {spelled}, so the schema would have no end. {verb} "
            "the inner ones in another way."
        )


_Mapping = typing.get_origin(typing.Mapping[str, int])
_LISTED = frozenset({"SymInt", "float", "bool", "str"})
