"""Takes objects apart that Dynamo describes instead of holding them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torchop._errors import ArgumentError
from torchop._schema.structure.nodes import Fields, Leaf, Node
from torchop._schema.structure.shapes import DataclassShape
from torchop._schema.structure.structure import Structure


class Compiler(Protocol):
    """What is known of values while a program is traced."""

    def type_of(self, value: Any) -> type | None:
        """The very type of a value; None if that is not known."""

    def attribute(self, value: Any, name: str) -> Any:
        """The description of an attribute."""

    def constant(self, value: Any) -> Any:
        """A value that is the same in every call of the graph.

        Raises:
            NotImplementedError: it may be another one.
        """

    def describe(self, constant: Any) -> Any:
        """The description of such a value.

        Raises:
            NotImplementedError: the compiler describes no values of its type.
        """


class UnclearError(Exception):
    """What becomes of a value only the code of the handle can tell, when it is traced."""


def flat_call(
    structure: Structure, args: Sequence[Any], kwargs: Mapping[str, Any], compiler: Compiler
) -> tuple[list[Any], dict[str, Any]] | None:
    """What the code of a handle would call the flat operator with.

    That code checks the type of every field. Where all types are known to be right, a trace of it
    finds out nothing, and takes longer than all the rest of the call.

    Returns:
        The arguments by position, and by name; None if something else may happen, such as an error.
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
    elif type(node) is Fields and type(node.shape) is DataclassShape:
        cls = node.shape.cls
        if compiler.type_of(value) is not cls or not _has_plain_attributes(cls, node.fields):
            raise UnclearError
        for name, part in node.fields.items():
            yield from _leaves(part, compiler.attribute(value, name), compiler)
    else:
        raise UnclearError


def _has_plain_attributes(cls: type, names: Iterable[str]) -> bool:
    """Whether reading these runs no code of the class, which must not run twice in a trace."""
    return (
        getattr(cls, "__getattribute__", None) is object.__getattribute__
        and not hasattr(cls, "__getattr__")
        and not any(isinstance(inspect.getattr_static(cls, n, None), property) for n in names)
    )


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
        encoded = leaf.kind.encode(constant, leaf.where)
    except (
        ArgumentError
    ) as error:  # of a wrong value: a trace raises it where the program can catch it
        raise UnclearError from error
    return compiler.describe(encoded)
