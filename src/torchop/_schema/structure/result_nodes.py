"""Nodes of annotation trees for results. See `nodes`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torchop._schema.kinds import Encode, Kind, unchanged
from torchop._schema.structure.nodes import Fields, Leaf, Node, Variables
from torchop._schema.structure.shapes import ClassShape
from torchop._schema.structure.source import Source


class ResultFields(Fields):
    """A result with fields, such as a dataclass.

    Backward formulas receive the gradients of the fields as an object of the same class.
    """

    def gather(self, values: Mapping[str, Any]) -> Any:
        parts = {name: node.gather(values) for name, node in self.fields.items()}
        if not isinstance(self.shape, ClassShape):
            return tuple(parts.values())
        cls = self.shape.cls
        if not dataclasses.is_dataclass(cls):
            return cls(**parts)
        # Skip the class's __init__, because it may validate the fields, and gradients may not pass
        # its checks.
        result = object.__new__(cls)
        for name, value in parts.items():
            object.__setattr__(result, name, value)
        return result

    def _split(self, value: Any) -> Mapping[str, Any]:
        if isinstance(value, Mapping):
            return {name: value.get(name) for name in self.fields}
        if isinstance(self.shape, ClassShape) and type(value) is self.shape.cls:
            return {name: getattr(value, name) for name in self.fields}
        if isinstance(value, (tuple, list)) and len(value) == len(self.fields):
            return dict(zip(self.fields, value, strict=True))
        return dict.fromkeys(self.fields, value)  # use a single value for all fields


def result_leaf(path: str, schema: str, decode: Encode | None = None) -> Leaf:
    return Leaf(path, path, Kind(schema, unchanged, decode=decode))


class Described(str):
    """A description of a value that error messages show without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


class Static(Node):
    """A part of a result that the fake kernel determines, such as a string.

    The schema has no separate result for this part. Its value is stored in the layout, a tuple of
    all non-tensor parts of the result, which a single int in the schema identifies.

    Attributes:
        check: validates a value and returns it in a hashable form.
        exact: values of exactly this class need no check.
        decode: converts the hashable form back to the field's value. None if both are the same.
        is_number: whether the value may be equal to a value of another type, such as 1 and 1.0.
        describe: describes the hashable form for error messages, as pairs of a path and a text.
    """

    def __init__(
        self,
        path: str,
        check: Encode,
        *,
        exact: type | None = None,
        is_optional: bool = False,
        decode: Callable[[Any], Any] | None = None,
        is_number: bool = False,
        describe: Callable[[Any], Iterable[tuple[str, Any]]] | None = None,
    ) -> None:
        super().__init__(path)
        self.name = f"{path} (static)"  # a list of optional tensors also has a leaf with this path
        self.check = check
        self.exact = exact
        self.is_optional = is_optional
        self.decode = decode
        self.is_number = is_number
        self._describe = describe

    def statics(self) -> Iterator[Static]:
        yield self

    def described(self, value: Any) -> Iterable[tuple[str, Any]]:
        # All parts of an optional structure are None if the structure itself is None.
        if value is None or self._describe is None:
            return [(self.path, value)]
        return self._describe(value)

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        name = variables[self.name]
        source.line(f"{name} = {value}")
        check = source.object(self.check, f"check_{self.path}")
        self._convert(source, name, check, self.path, self.exact)

    def rebuild(self, source: Source, variables: Variables) -> str:
        name = variables[self.name]
        if self.decode is None:
            return name
        decoded = f"{source.object(self.decode)}({name})"
        return f"None if {name} is None else {decoded}" if self.is_optional else decoded
