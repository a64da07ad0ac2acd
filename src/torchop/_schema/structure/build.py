"""Builds the tree of an argument from an annotation."""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchop._compat import schemas
from torchop._errors import SchemaError
from torchop._schema import types
from torchop._schema.callables import accepts
from torchop._schema.structure import pairs
from torchop._schema.structure.argument_types import registered
from torchop._schema.structure.choices import choice_kind
from torchop._schema.structure.kinds import KINDS, Kind, single_kind
from torchop._schema.structure.nodes import MISSING, Fields, Leaf, Maybe, Node, Pair, Shape
from torchop._schema.structure.sequences import list_of, read_container, sequence_kind
from torchop._schema.structure.shapes import (
    DataclassShape,
    NamedTupleShape,
    RegisteredShape,
    TypedDictShape,
    makes_itself,
)
from torchop._schema.structure.source import is_plain


class UnsupportedTypeError(Exception):
    """An annotation, at a path, that no tree can stand for."""

    def __init__(self, path: str, annotation: Any) -> None:
        super().__init__(path)
        self.path = path
        self.annotation = annotation


class Field(typing.NamedTuple):
    """A field of a structure, as it is declared."""

    annotation: Any
    default: Any = MISSING


class Builder:
    """Builds the trees of one signature; `op` is the name of the operator, for messages."""

    def __init__(self, op: str) -> None:
        self.op = op

    def build(
        self, annotation: Any, path: str, default: Any = MISSING, inside: tuple[Any, ...] = ()
    ) -> Node:
        """The tree of an argument, or of a part such as `cfg.scale` inside other structures."""
        annotation = _without_annotated(annotation)
        leaf = self._leaf(annotation, path, default)
        if leaf is not None:
            return leaf
        inner, optional = types.strip_optional(annotation)
        if optional:
            return self._maybe(inner, path, default, None, inside)
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
            kind = Kind(schema, lambda value, where: value, is_optional=is_optional)
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

    def _maybe(
        self, inner: Any, path: str, default: Any, absent: Any, inside: tuple[Any, ...]
    ) -> Maybe:
        part = MISSING if default is absent else default
        node = self.build(inner, path, part, inside)
        # A key that may be missing can hold a structure that may be None: two flags.
        name = self._name(f"{path}.present" if isinstance(node, Maybe) else f"{path}.given")
        flag = Leaf(self.op, path, name, KINDS[bool], MISSING, checked=False)
        return Maybe(self.op, flag, node, absent, default)

    def _fields(
        self, annotation: Any, path: str, default: Any, inside: tuple[Any, ...]
    ) -> Fields | None:
        declared = declared_fields(annotation)
        if declared is None:
            return None
        shape, fields = declared
        spelled = types.spell(annotation)
        if annotation in inside:
            raise SchemaError(
                f"{self.op}: {path} is a {spelled} inside a {spelled}, so the schema would have no "
                "end. Pass the inner ones in another way."
            )
        if default is None:
            raise SchemaError(
                f"{self.op}: {path} defaults to None; annotate it as Optional[{spelled}]."
            )
        defaults: Mapping[str, Any] | None = {name: f.default for name, f in fields.items()}
        if default is not MISSING:
            defaults = shape.parts(default, tuple(fields))
        if defaults is None:
            raise SchemaError(
                f"{self.op}: {path} has a default of type {types.spell(type(default))}; expected "
                f"{spelled}."
            )
        nodes: dict[str, Node] = {}
        for name, field in fields.items():
            place = f"{path}.{name}", defaults.get(name, MISSING)
            if isinstance(shape, TypedDictShape) and name not in shape.required:
                # Calls in older graphs leave out a key that was added since.
                inner = _without_annotated(field.annotation)
                nodes[name] = self._maybe(inner, *place, MISSING, (*inside, annotation))
            else:
                nodes[name] = self.build(field.annotation, *place, (*inside, annotation))
        return Fields(self.op, path, nodes, shape)

    def _pair(self, annotation: Any, path: str, default: Any) -> Pair | None:
        origin, args = typing.get_origin(annotation), typing.get_args(annotation)
        if origin in (dict, _Mapping) and args and args[0] is str:
            return self._pair_of(
                leaf_kind(args[1]), path, default, ("keys", "values"), pairs.mapping
            )
        outer = read_container(annotation)
        inner = None if outer is None else read_container(outer.item)
        if outer is None or inner is None:
            return None
        convert = functools.partial(pairs.nested, outer, inner)
        return self._pair_of(leaf_kind(inner.item), path, default, ("values", "lengths"), convert)

    def _pair_of(
        self,
        item: Kind | None,
        path: str,
        default: Any,
        names: tuple[str, str],
        convert: Callable[[Kind], Any],
    ) -> Pair | None:
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
            return Leaf(self.op, place, self._name(place), list_of(items[name]), value)

        first, second = map(leaf, names, flat)
        return Pair(self.op, path, (first, second), encode, decode)


def leaf_kind(annotation: Any) -> Kind | None:
    """The kind of an annotation that one flat argument can stand for."""
    annotation = _without_annotated(annotation)
    inner, optional = types.strip_optional(annotation)
    inner = _without_annotated(inner)
    kind = choice_kind(inner) or single_kind(inner) or sequence_kind(inner)
    if kind is None or not optional:
        return kind
    if kind.schema == "Tensor[]":
        return None  # the dispatcher does not look into an optional list of tensors
    return kind._replace(is_optional=True)


def declared_fields(annotation: Any) -> tuple[Shape, dict[str, Field]] | None:
    """The shape and the fields of a structure; None if the annotation is none."""
    if not isinstance(annotation, type):
        return None
    registration = registered(annotation)
    if registration is not None:
        parameters = registration.signature.parameters.values()
        fields = {p.name: Field(p.annotation, p.default) for p in parameters}
        return RegisteredShape(annotation, registration, fields), fields
    if dataclasses.is_dataclass(annotation):
        return DataclassShape(annotation), fields_of_dataclass(annotation)
    if issubclass(annotation, tuple) and hasattr(annotation, "_fields"):
        named = fields_of_named_tuple(annotation)
        return None if named is None else (NamedTupleShape(annotation), named)
    if issubclass(annotation, dict) and hasattr(annotation, "__required_keys__"):
        hints = hints_of(annotation)
        shape = TypedDictShape(annotation, hints, _required_keys(annotation))
        return shape, {name: Field(hint) for name, hint in hints.items()}
    return None


def fields_of_dataclass(cls: Any) -> dict[str, Field]:
    """The fields from which an object can be rebuilt; refuses other classes."""
    hints = hints_of(cls)
    unknown = [name for name, hint in hints.items() if isinstance(hint, dataclasses.InitVar)]
    if unknown:
        raise SchemaError(
            f"{types.spell(cls)} cannot be taken apart: its InitVar {unknown[0]!r} is not kept in "
            "the object, so the object cannot be rebuilt. Use a field."
        )
    fields = {}
    for field in dataclasses.fields(cls):
        if not field.init and makes_itself(cls):
            continue  # the code of the class computes it again
        default: Any = MISSING
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            default = field.default
        fields[field.name] = Field(hints[field.name], default)
    if makes_itself(cls) and not accepts(cls, (), fields):
        raise SchemaError(
            f"{types.spell(cls)} cannot be taken apart: its __init__ does not take its fields "
            f"({', '.join(fields)}) by name, so the object cannot be rebuilt. Let __init__ take "
            "them, or register the class with torchop.register_argument_type."
        )
    return fields


def fields_of_named_tuple(cls: Any) -> dict[str, Field] | None:
    """The fields; None for a `collections.namedtuple`, which does not say of which types it is."""
    hints = hints_of(cls)
    if not set(cls._fields) <= set(hints):
        return None
    return {n: Field(hints[n], cls._field_defaults.get(n, MISSING)) for n in cls._fields}


def _required_keys(cls: Any) -> set[str]:
    """The keys that a TypedDict requires, also where its annotations are strings.

    `__required_keys__` does not look into those (https://peps.python.org/pep-0655).
    """
    required = set(cls.__required_keys__)
    for name, hint in hints_of(cls, extras=True).items():
        wrapper = _wrapper(hint)
        if wrapper == "Required":
            required.add(name)
        elif wrapper == "NotRequired":
            required.discard(name)
    return required


def hints_of(cls: Any, *, extras: bool = False) -> dict[str, Any]:
    """The annotations of a class, evaluated; with `extras`, in wrappers such as `Annotated`."""
    try:
        return typing.get_type_hints(cls, localns={"Tensor": torch.Tensor}, include_extras=extras)
    except Exception as error:
        raise SchemaError(
            f"{types.spell(cls)} has an annotation that is not a type ({error}); import what it "
            "names at module level, where annotations are looked up."
        ) from None


def _without_annotated(annotation: Any) -> Any:
    while _wrapper(annotation) in _WRAPPERS:
        annotation = typing.get_args(annotation)[0]
    return annotation


def _wrapper(annotation: Any) -> str:
    # By name, because `typing_extensions` defines its own for Python 3.10.
    return str(typing.get_origin(annotation)).rpartition(".")[2].rstrip("'>")


_Mapping = typing.get_origin(typing.Mapping[str, int])
_WRAPPERS = frozenset({"Annotated", "Required", "NotRequired", "ReadOnly"})
_LISTED = frozenset({"SymInt", "float", "bool", "str"})
