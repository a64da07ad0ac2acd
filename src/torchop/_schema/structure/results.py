"""Build the annotation tree of a result."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import torch

from torchop._compat import opaque_types
from torchop._errors import ArgumentError, ResultError, mistake
from torchop._schema import types
from torchop._schema.kinds import (
    KINDS,
    Container,
    Encode,
    Kind,
    is_by_reference,
    is_object,
    leaf_kind,
    list_of,
    read_container,
    without_annotated,
)
from torchop._schema.structure.items import Items
from torchop._schema.structure.nodes import Leaf, Maybe, Node
from torchop._schema.structure.result_nodes import Described, ResultFields, Static, result_leaf
from torchop._schema.structure.shapes import result_shape

RESULT = "the result"  # replaces the path in error messages about the result


class UnsupportedTypeError(Exception):
    """Raised if the annotation of an argument, result or field is not supported.

    `path` names the argument or field, such as `cfg.scale`.
    """

    def __init__(self, path: str, annotation: Any) -> None:
        super().__init__(path)
        self.path = path
        self.annotation = annotation


def build_result(annotation: Any, path: str = RESULT, inside: tuple[Any, ...] = ()) -> Node:
    """Build the annotation tree of a result, or of a field of a result.

    Tensors and ints become leaves, i.e. results in the schema. All other values become static
    parts, which are stored in the layout (see `layouts`). `inside` lists the types of the enclosing
    structures.
    """
    annotation = without_annotated(annotation)
    inner, optional = types.strip_optional(annotation)
    inner = without_annotated(inner)
    node: Node | None
    node = (
        _leaf(inner, path, optional=optional)
        or _static(annotation, path)
        or _objects(annotation, path)
    )
    if node is None and optional:
        node = _maybe(build_result(inner, path, inside))
    node = node or _fields(annotation, path, inside) or _items(annotation, path, inside)
    if node is None:
        raise UnsupportedTypeError(path, annotation)
    return node


def check_end(path: str, annotation: Any, inside: tuple[Any, ...], verb: str) -> None:
    if annotation in inside:
        spelled = types.spell(annotation)
        raise mistake(
            f"{path} is a {spelled} inside a {spelled}, so the schema would be infinite. {verb} "
            "the inner objects in another way."
        )


def _leaf(annotation: Any, path: str, *, optional: bool) -> Leaf | None:
    """Build the tree node of a tensor, of a list or tuple of tensors, or of an int."""
    if annotation is torch.Tensor:
        return result_leaf(path, "Tensor?" if optional else "Tensor")
    if optional:
        return None
    if annotation is int:
        kind = Kind("SymInt", _of_result(KINDS[int].encode), int)
        return Leaf(path, path, kind)
    container = _container(annotation)
    if container is None or container.item is not torch.Tensor:
        return None
    to_tuple = None if not container.is_tuple else lambda tensors, where: tuple(tensors)
    return result_leaf(path, "Tensor[]", to_tuple)


def _container(annotation: Any) -> Container | None:
    """Parse `list[X]` or `tuple[X, ...]`."""
    if typing.get_origin(annotation) not in (list, tuple):
        return None
    container = read_container(annotation)
    return None if container is None or container.length is not None else container


def _items(annotation: Any, path: str, inside: tuple[Any, ...]) -> Items | None:
    """Build the tree node of a list, tuple or dict with items such as dataclasses."""
    args = typing.get_args(annotation)
    if typing.get_origin(annotation) is dict and args[0] is str:
        container: type = dict
        item = args[1]
    elif (listed := _container(annotation)) is not None:
        container, item = tuple if listed.is_tuple else list, listed.item
    else:
        return None
    node = build_result(item, f"{path}[*]", inside)
    for leaf in node.leaves():
        if is_by_reference(leaf.kind.schema):
            raise mistake(
                f"{leaf.path} is an object that is passed by reference, which cannot be a field of "
                "a structure in a list, or an item of a dict. Return a list of objects."
            )
        if leaf.is_tensor:  # the dispatcher checks items too, but can't name their paths
            _check_tensors(leaf)
    return Items(path, node, container)


def _check_tensors(leaf: Leaf) -> None:
    is_list = leaf.kind.schema == "Tensor[]"
    leaf.is_optional = leaf.kind.schema == "Tensor?"
    kind = list_of(KINDS[torch.Tensor]) if is_list else KINDS[torch.Tensor]
    leaf.kind = leaf.kind._replace(encode=_of_result(kind.encode), exact=kind.exact)
    leaf.checked = True


def _objects(annotation: Any, path: str) -> Leaf | Static | None:
    """Build the tree node of an opaque object, or of a list or tuple of opaque objects."""
    kind = leaf_kind(annotation)
    if kind is None or not is_object(kind):
        return None
    inner, optional = types.strip_optional(annotation)
    container, check = read_container(inner), _of_result(kind.encode)
    cls = types.strip_optional(inner if container is None else container.item)[0]
    if opaque_types.is_by_value(cls):
        if container is None:
            return Static(path, check, is_optional=optional)
        return Static(
            path,
            lambda values, where: tuple(check(values, where)),
            is_optional=optional,
            decode=tuple if container.is_tuple else list,
        )
    schema = f"{kind.schema}{'?' * optional}"
    is_tuple = container is not None and container.is_tuple
    decode = (lambda objects, where: tuple(objects)) if is_tuple else None
    leaf = Leaf(path, path, Kind(schema, check, decode=decode))
    leaf.is_optional = optional
    return leaf


def _maybe(inner: Node) -> Maybe:
    for leaf in inner.leaves():
        if leaf.kind.schema == "Tensor":
            leaf.kind = leaf.kind._replace(schema="Tensor?")
        elif is_object(leaf.kind) and not leaf.is_optional:
            leaf.kind = leaf.kind._replace(schema=f"{leaf.kind.schema}?")
        elif leaf.kind.schema == "SymInt":
            leaf.default = 0  # returned instead of the int if the structure is None
    flag = Static(
        inner.path,
        lambda value, where: value,
        exact=bool,
        describe=lambda given: [(inner.path, Described("not None" if given else "None"))],
    )
    flag.name = f"{inner.path} (given)"  # a static part of the structure may have the same path
    return Maybe(flag, inner)


def _fields(annotation: Any, path: str, inside: tuple[Any, ...]) -> Node | None:
    shape = result_shape(annotation)
    if shape is None:
        return None
    check_end(path, annotation, inside, "Return")
    nodes = {}
    for name, field in shape.fields.items():
        # Use join instead of an f-string: a field's name may be an instance of a str subclass, and
        # an f-string would call its `__format__`.
        is_tuple = typing.get_origin(annotation) is tuple
        place = f"{path}[{name}]" if is_tuple else ".".join((path, name))
        nodes[name] = build_result(field.annotation, place, (*inside, annotation))
    return ResultFields(path, nodes, shape)


_SINGLE = ("float", "bool", "str", "Scalar", "ScalarType", "Device", "Layout", "MemoryFormat")
_LISTS = ("SymInt[]", "float[]", "bool[]", "str[]", "Scalar[]")
_NUMBERS = ("float", "Scalar", "float[]", "Scalar[]")


def _static(annotation: Any, path: str) -> Static | None:
    """Build the tree node of a value other than a tensor or int, such as a string or a dtype."""
    kind = leaf_kind(annotation)
    is_int = types.strip_optional(annotation)[0] is int
    if kind is None or is_int or kind.schema not in (*_SINGLE, "SymInt", *_LISTS):
        return None
    encode, decode, is_list = kind.encode, kind.decode, kind.schema in _LISTS

    def value_of(value: Any, where: str) -> Any:
        value = encode(value, where)
        value = value if decode is None else decode(value, where)
        return tuple(value) if is_list else value  # a list cannot be hashed

    container = read_container(types.strip_optional(annotation)[0]) if is_list else None
    rebuild: Callable[[Any], Any] | None = None
    if is_list and not (container is not None and container.is_tuple):
        rebuild = torch.Size if container is None else list
    return Static(
        path,
        _of_result(value_of),
        exact=None if is_list else kind.exact,
        is_optional=kind.is_optional,
        decode=rebuild,
        is_number=kind.schema in _NUMBERS,
    )


def _of_result(encode: Encode) -> Encode:
    def check(value: Any, where: str) -> Any:
        try:
            return encode(value, where)
        except ArgumentError as error:
            raise ResultError(f"{error} The function returned this value.") from None

    return check
