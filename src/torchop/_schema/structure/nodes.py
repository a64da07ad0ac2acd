"""Annotation trees, which describe how a structured value is split into flat values.

For example, a dataclass becomes a node with a child for each field, and each leaf is one argument
or result of the operator's schema. The nodes generate code that flattens a structured value into
the values of the leaves, and code that rebuilds the structured value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchop._errors import ArgumentError, GradientError, SchemaError, mistake
from torchop._schema import defaults, types
from torchop._schema.kinds import Kind, unchanged
from torchop._schema.structure.shapes import MISSING, Shape, as_mapping
from torchop._schema.structure.source import Source

# For each argument or result in the schema, maps its name to the name of the variable that holds
# its value in generated code.
Variables = Mapping[str, str]


TENSOR_LISTS = ("Tensor[]", "Tensor?[]")


class Node:
    """A node of an annotation tree, which describes one argument or field, such as `cfg.box`."""

    is_optional = False

    def __init__(self, path: str, parts: Sequence[Node] = ()) -> None:
        self.path = path
        self._parts = parts

    def leaves(self) -> Iterator[Leaf]:
        for part in self._parts:
            yield from part.leaves()

    def statics(self) -> Iterator[Any]:
        """Yield a `Static` node for each part of a result that is neither a tensor nor an int."""
        for part in self._parts:
            yield from part.statics()

    def keys_of_tensors(self) -> Iterator[Leaf]:
        """Yield the leaves that hold dict keys, for dicts with tensor values."""
        for part in self._parts:
            yield from part.keys_of_tensors()

    def set_default(self, value: Any) -> None:
        """Set the defaults of all leaves, which are the arguments in the schema.

        `value` is the default of the whole argument or field, or `MISSING` if it has no default.
        """
        raise NotImplementedError

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        """Emit statements that assign the parts of a value to the leaves' variables.

        `value` is a Python expression for the value. Each leaf is an argument or result in the
        schema.
        """
        raise NotImplementedError

    def rebuild(self, source: Source, variables: Variables) -> str:
        """Emit statements that rebuild the value, and return a Python expression for it."""
        raise NotImplementedError

    def gather(self, values: Mapping[str, Any]) -> Any:
        """Group values, such as gradients, into a mapping from field names to values.

        `values` maps the names of leaves (arguments or results in the schema) to values. It may
        also hold static (non-tensor) parts of the call by name, such as the keys of a dict.
        """
        return None  # for nodes without tensors

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        """Split `value` into a dict from the names of arguments or results in the schema to values.

        `value` is an object of this structure, a mapping from field names to values, or None.
        `known` holds the static (non-tensor) parts of the call by name.
        """
        return {}  # for nodes without tensors

    @property
    def holds_tensors(self) -> bool:
        return any(leaf.is_tensor for leaf in self.leaves())

    def _convert(
        self, source: Source, name: str, function: str, path: str, exact: type | None = None
    ) -> None:
        """Emit a statement that replaces a variable by `function(variable)`.

        At run time, the generated code skips the statement if the variable has exactly the type
        `exact`, or if it is None and the value is optional.
        """
        conditions = [f"{name} is not None"] * self.is_optional
        if exact is not None:
            conditions.append(f"{source.object(type)}({name}) is not {source.object(exact)}")
        with source.condition(conditions):
            source.line(f"{name} = {function}({name}, {source.where(path)})")


class Leaf(Node):
    """One argument or result in the schema.

    Attributes:
        checked: whether generated code checks and encodes the value. If False, the dispatcher
            checks the value.
        unwritable_default: the default, if the schema language cannot express it. The default in
            the schema is then None.
        is_required_if_given: whether the value may be None only if the enclosing structure is None.
    """

    def __init__(self, path: str, name: str, kind: Kind) -> None:
        super().__init__(path)
        self.name = name
        self.kind = kind
        self.checked = kind.encode is not unchanged and ("." in path or not kind.is_plain)
        self.is_optional = kind.is_optional
        self.unwritable_default: Any = MISSING
        self.default: Any = MISSING
        self.is_required_if_given = False

    def set_plain_default(self, value: Any) -> None:
        self.is_optional |= value is None
        defaults.render(value, self.schema_type)
        self.default = value

    def set_default(self, value: Any) -> None:
        if value is MISSING:
            return
        self.is_optional |= value is None
        default = None if value is None else self.kind.encode(value, f"{self.path}: the default")
        try:
            defaults.render(default, self.schema_type)
        except SchemaError:
            if self.is_optional or self.is_tensor:
                return  # None is a valid value, so it can't represent the default in the schema
            self.unwritable_default = default
            default = None
        self.default = default

    @property
    def flat_path(self) -> str:
        """How error messages about a flat call (one argument per field) name this argument."""
        return f"argument {self.name!r}" + f" ({self.path})" * (self.path != self.name)

    @property
    def is_tensor(self) -> bool:
        # Only look at the start of the schema type, because the name of an opaque class may contain
        # "Tensor" as well.
        return self.kind.schema.startswith("Tensor")

    def make_optional(self) -> None:
        """Add a default, which is passed if the enclosing optional structure is None."""
        if self.kind.schema in TENSOR_LISTS or self.default is not MISSING:
            return  # keep lists required, because the dispatcher ignores tensors in optional lists
        self.is_required_if_given = not self.is_optional
        self.default = None

    @property
    def schema_type(self) -> str:
        has_none = self.is_required_if_given or self.unwritable_default is not MISSING
        return self.kind.schema + "?" * (self.is_optional or has_none)

    def placeholder(self, source: Source) -> str:
        if self.default is not MISSING and self.default is not None:
            return source.object(self.default, f"default_{self.name}")
        return "[]" if self.kind.schema in TENSOR_LISTS and not self.is_optional else "None"

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        name = variables[self.name]
        if name != value:
            source.line(f"{name} = {value}")
        if not self.checked:
            return
        what = self.name if self.kind.exact is None else self.kind.exact.__name__
        encode = source.object(self.kind.encode, f"check_{what}")
        self._convert(source, name, encode, self.path, self.kind.exact)

    def rebuild(self, source: Source, variables: Variables) -> str:
        name = variables[self.name]
        if self.unwritable_default is not MISSING or isinstance(self.default, list):
            value = self.default if self.unwritable_default is MISSING else self.unwritable_default
            default = source.object(value, f"default_{self.name}")
            absent = "None" if self.unwritable_default is not MISSING else default
            if isinstance(value, list):  # pass a copy, because the kernel may modify the list
                default = f"{source.object(list)}({default})"
            with source.block(f"if {name} is {absent}:"):
                source.line(f"{name} = {default}")
        if self.is_required_if_given:
            error = source.object(missing_argument)
            with source.block(f"if {name} is None:"):
                source.line(f"raise {error}({source.where(self.flat_path)})")
        if self.kind.decode is not None:
            decode = source.object(self.kind.decode, f"decode_{self.name}")
            self._convert(source, name, decode, self.flat_path)
        return name

    def gather(self, values: Mapping[str, Any]) -> Any:
        return values.get(self.name)

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        return {self.name: value}


def missing_argument(where: str) -> Exception:
    return ArgumentError(f"{where}: missing, although the enclosing structure is given.")


class Fields(Node):
    def __init__(self, path: str, fields: Mapping[str, Node], shape: Shape) -> None:
        super().__init__(path, tuple(fields.values()))
        self.fields = fields
        self.shape = shape

    def set_default(self, value: Any) -> None:
        spelled = self.shape.qualified
        if value is None:
            raise mistake(f"{self.path} defaults to None; annotate it as Optional[{spelled}].")
        parts: Mapping[str, Any] | None
        if value is MISSING:
            parts = {name: field.default for name, field in self.shape.fields.items()}
        else:
            parts = self.shape.parts(value)
        if parts is None:
            raise mistake(
                f"{self.path} has a default of type {types.spell(type(value))}; expected {spelled}."
            )
        for name, node in self.fields.items():
            node.set_default(parts.get(name, MISSING))

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        parts = self.shape.unpack(source, value, self.path)
        for name, node in self.fields.items():
            part = parts(name)
            if isinstance(node, Leaf):
                node.flatten(source, part, variables)
            else:
                local = source.variable(f"{value}_{name}")
                source.line(f"{local} = {part}")
                node.flatten(source, local, variables)

    def rebuild(self, source: Source, variables: Variables) -> str:
        fields = {name: node.rebuild(source, variables) for name, node in self.fields.items()}
        return self.shape.construct(source, fields)

    def gather(self, values: Mapping[str, Any]) -> Any:
        fields = {name: node.gather(values) for name, node in self.fields.items()}
        return fields if any(value is not None for value in fields.values()) else None

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, part in self._split(value).items():
            flat |= self.fields[name].spread(part, known)
        return flat

    def _split(self, value: Any) -> Mapping[str, Any]:
        # Accept an instance of any class with these fields, because authors may declare a separate
        # class for gradients.
        parts = {} if value is None else self.shape.parts(as_mapping(value))
        if parts is None:
            names = ", ".join(self.fields)
            expected = f"None, {self.shape.spelled}, or a mapping with the fields {names}"
            raise GradientError(
                f"backward returned the wrong gradient for input {self.path!r}: expected "
                f"{expected}, got {type(value).__name__}."
            )
        return parts


class Pair(Node):
    """A value that is split in two, such as a dict into a list of keys and a list of values.

    If the second part is a list of tensors, the first part contains their keys.
    """

    def __init__(
        self,
        path: str,
        pair: tuple[Leaf, Leaf],
        encode: Callable[[Any, str], tuple[Any, Any]],
        decode: Callable[[Any, Any, str], Any],
    ) -> None:
        super().__init__(path, pair)
        self.pair = pair
        self.encode = encode
        self.decode = decode

    def set_default(self, value: Any) -> None:
        if value is MISSING:
            return
        parts = self.encode(value, f"{self.path}: the default")
        for leaf, part in zip(self.pair, parts, strict=True):
            leaf.set_default(part)

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        first, second = (variables[part.name] for part in self.pair)
        encode = source.object(self.encode, f"encode_{self.pair[0].path}")
        source.line(f"{first}, {second} = {encode}({value}, {source.where(self.path)})")

    def rebuild(self, source: Source, variables: Variables) -> str:
        first, second = (part.rebuild(source, variables) for part in self.pair)
        decode = source.object(self.decode, f"decode_{self.pair[0].path}")
        local = source.variable(f"made_{self.pair[0].path}")
        source.line(f"{local} = {decode}({first}, {second}, {source.where(self.path)})")
        return local

    def keys_of_tensors(self) -> Iterator[Leaf]:
        key, values = self.pair
        if values.is_tensor:
            yield key

    def gather(self, values: Mapping[str, Any]) -> Any:
        key, tensors = self.pair
        found, given = values.get(tensors.name), values.get(key.name)
        if not isinstance(found, (list, tuple)) or given is None:
            return found
        return self.decode(given, found, self.path)

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        key, tensors = self.pair
        given = known.get(key.name)
        if isinstance(value, Mapping):
            names = value if given is None else given
            if not set(value) <= set(names):
                raise GradientError(
                    f"backward returned the wrong gradient for input {self.path!r}: expected a "
                    f"dict with the keys {', '.join(names)}; got the keys "
                    f"{', '.join(map(str, value))}."
                )
            value = [value.get(name) for name in names]
        return {tensors.name: value}


class Maybe(Node):
    """An optional structure, with a flag that is False if the structure is None.

    If the structure is an argument, the flag is an extra bool argument of the schema.
    """

    def __init__(self, flag: Any, inner: Node) -> None:
        super().__init__(inner.path, (flag, inner))
        self.flag = flag
        self.inner = inner

    def set_default(self, value: Any) -> None:
        self.inner.set_default(MISSING if value is None else value)
        assert isinstance(self.flag, Leaf)  # results have no defaults
        if value is not MISSING:
            self.flag.default = value is not None
        for leaf in self.inner.leaves():
            leaf.make_optional()

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        flag = variables[self.flag.name]
        source.line(f"{flag} = {value} is not None")
        with source.block(f"if {flag}:"):
            self.inner.flatten(source, value, variables)
        with source.block("else:"):
            for leaf in self.inner.leaves():
                source.line(f"{variables[leaf.name]} = {leaf.placeholder(source)}")
            for static in self.inner.statics():
                source.line(f"{variables[static.name]} = None")

    def rebuild(self, source: Source, variables: Variables) -> str:
        local = source.variable(f"made_{self.inner.path}")
        source.line(f"{local} = None")
        with source.block(f"if {variables[self.flag.name]}:"):
            source.line(f"{local} = {self.inner.rebuild(source, variables)}")
        return local

    def gather(self, values: Mapping[str, Any]) -> Any:
        return None if values.get(self.flag.name) is False else self.inner.gather(values)

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        return {} if value is None else self.inner.spread(value, known)


class Parameter(NamedTuple):
    declared: inspect.Parameter
    node: Node

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def keyword_only(self) -> bool:
        return self.declared.kind is inspect.Parameter.KEYWORD_ONLY

    @property
    def has_default(self) -> bool:
        return self.declared.default is not inspect.Parameter.empty

    @property
    def is_plain(self) -> bool:
        by_position = self.declared.kind is inspect.Parameter.POSITIONAL_ONLY
        return not by_position and isinstance(self.node, Leaf) and self.node.kind.is_plain
