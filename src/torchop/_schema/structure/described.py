"""Flatten the structured arguments of a call while Dynamo traces it.

In eager mode, generated code (see `Structure`) turns structures, such as dataclasses, into the
arguments of the operator's schema, and checks the type of every field. Dynamo could trace the
generated code too, but tracing its checks would take longer than tracing the rest of the call. So
this module computes the same arguments without tracing anything.
"""

from __future__ import annotations

import collections
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torchop._errors import ArgumentError
from torchop._schema.structure.nodes import Fields, Leaf, Node
from torchop._schema.structure.shapes import DataclassShape, NamedTupleShape, Shape
from torchop._schema.structure.structure import Structure

# The descriptor types of slots and NamedTuple fields. They are safe to read while tracing, because
# reading them runs no Python code.
_PLAIN_DESCRIPTORS = (
    types.MemberDescriptorType,
    type(inspect.getattr_static(collections.namedtuple("_", "field"), "field")),
)


class Compiler(Protocol):
    """The interface to a compiler, such as Dynamo, and to the values that it traces."""

    def type_of(self, value: Any) -> type | None:
        """Return the exact type of a traced value, or None if it is unknown."""

    def attributes(self, value: Any, cls: type, names: Sequence[str]) -> Sequence[Any] | None:
        """Return attributes of a traced object, as traced values.

        Return None if the object's type is not exactly `cls`. Callers must make sure that reading
        these attributes runs no Python code.
        """

    def constant(self, value: Any) -> Any:
        """Return the constant behind a traced value. Raise NotImplementedError if there is none."""

    def describe(self, constant: Any) -> Any:
        """Wrap a constant as a traced value.

        Raise NotImplementedError if the compiler does not support constants of this type.
        """


class UnclearError(Exception):
    """Raised if the flat arguments can only be computed by tracing the generated code."""


def flat_call(
    structure: Structure, args: Sequence[Any], kwargs: Mapping[str, Any], compiler: Compiler
) -> tuple[list[Any], dict[str, Any]] | None:
    """Return the same positional and keyword arguments that the generated code would pass.

    Return None if Dynamo must trace the generated code after all, for example because the generated
    code may raise an error for these arguments.
    """
    if structure.returns_objects:
        return None
    signature = inspect.Signature([parameter.declared for parameter in structure.parameters])
    try:
        passed = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return None
    try:
        flat: dict[str, Any] = {}
        for parameter in structure.parameters:
            if parameter.name in passed:
                value = passed[parameter.name]
            else:
                value = compiler.describe(parameter.declared.default)
            flat.update(_leaves(parameter.node, value, compiler))
    except (UnclearError, NotImplementedError):
        return None
    positional = [flat[leaf.name] for leaf in structure.positional]
    return positional, {leaf.name: flat[leaf.name] for leaf in structure.keyword_only}


def _leaves(node: Node, value: Any, compiler: Compiler) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Leaf):
        yield node.name, _leaf(node, value, compiler)
    elif isinstance(node, Fields):
        parts = _parts(node.shape, tuple(node.fields), value, compiler)
        for part, described in zip(node.fields.values(), parts, strict=True):
            yield from _leaves(part, described, compiler)
    else:
        raise UnclearError


def _parts(shape: Shape, names: tuple[str, ...], value: Any, compiler: Compiler) -> Iterable[Any]:
    parts: Iterable[Any] | None = None
    if isinstance(shape, (DataclassShape, NamedTupleShape)) and _has_plain_attributes(
        shape.cls, names
    ):
        parts = compiler.attributes(value, shape.cls, names)
    if parts is None:
        raise UnclearError
    return parts


def _has_plain_attributes(cls: type, names: Iterable[str]) -> bool:
    """Return whether reading these attributes of an instance runs no Python code.

    Reading a property, for example, calls a function. If `flat_call` read the property and then
    returned None, Dynamo would trace the generated code instead, so the property's function would
    run twice.
    """
    return (
        getattr(cls, "__getattribute__", None) in (object.__getattribute__, tuple.__getattribute__)
        and not hasattr(cls, "__getattr__")
        and not any(_runs_code(inspect.getattr_static(cls, name, None)) for name in names)
    )


def _runs_code(member: Any) -> bool:
    return hasattr(type(member), "__get__") and type(member) not in _PLAIN_DESCRIPTORS


def _leaf(leaf: Leaf, value: Any, compiler: Compiler) -> Any:
    cls = compiler.type_of(value)
    if not leaf.checked or (leaf.is_optional and cls is type(None)):
        return value
    if leaf.kind.exact is not None:
        if cls is not leaf.kind.exact:
            raise UnclearError
        return value
    constant = compiler.constant(value)
    try:
        encoded = leaf.kind.encode(constant, leaf.path)
    except ArgumentError as error:  # traced code raises it again, so programs can catch it
        raise UnclearError from error
    return compiler.describe(encoded)
