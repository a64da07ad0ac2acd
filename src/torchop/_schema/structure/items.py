"""Lists and dicts in results, including lists of structures such as dataclasses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torchop._errors import ResultError, short_repr
from torchop._schema import types
from torchop._schema.structure.nodes import Leaf, Node, Variables
from torchop._schema.structure.result_nodes import Described, Static, result_leaf
from torchop._schema.structure.shapes import wrong_result
from torchop._schema.structure.source import Source


class Items(Node):
    """A list, tuple or dict in a result.

    In the schema, the tensors of all items share a single list. Everything else goes into a static
    (non-tensor) part of the result. This part holds the keys of a dict and, for each item, one
    entry per field. The entry is True or None for a tensor, the length for a list of tensors, and
    the value itself for anything else.

    Attributes:
        item: the tree node for the annotation of one item. Its path ends in `[*]`.
    """

    def __init__(self, path: str, item: Node, container: type) -> None:
        self.item = item
        self._container = container
        self._leaves = tuple(item.leaves())
        self._statics = tuple(item.statics())
        self._names = [part.name for part in (*self._leaves, *self._statics)]
        self._static = Static(
            path,
            lambda value, where: value,
            is_number=any(not leaf.is_tensor for leaf in self._leaves)
            or any(static.is_number for static in self._statics),
            describe=self._describe,
        )
        self._tensors = result_leaf(f"{path}[*]", "Tensor[]")
        holds_tensors = any(leaf.is_tensor for leaf in self._leaves)
        super().__init__(path, (self._static, *[self._tensors] * holds_tensors))

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        entries, item = source.variable("entries"), source.variable("item")
        tensors = variables.get(self._tensors.name) or source.variable("tensors")
        parts = {name: source.variable(name) for name in self._names}
        check = source.object(self._checked, f"check_{self.path}")
        checked = f"{check}({value}, {source.where(self.path)})"
        items, index, keys = checked, f"len({entries})", "None"
        if self._container is dict:
            keys = source.variable("keys")
            source.line(f"{keys} = {checked}")
            items, index = f"{value}.values()", f"{keys}[{index}]"
        source.line(f"{entries}, {tensors} = [], []")
        with source.block("try:"), source.block(f"for {item} in {items}:"):
            self.item.flatten(source, item, parts)
            entry = [
                self._collect(source, leaf, parts[leaf.name], tensors) for leaf in self._leaves
            ]
            entry += [parts[static.name] for static in self._statics]
            source.line(f"{entries}.append(({', '.join(entry)},))")
        error = source.variable("error")
        with source.block(f"except {source.object(ResultError)} as {error}:"):
            source.line(f"raise {source.object(self._with_index)}({error}, {index}) from None")
        source.line(f"{variables[self._static.name]} = {keys}, tuple({entries})")

    def _collect(self, source: Source, leaf: Leaf, name: str, tensors: str) -> str:
        """Emit code that adds the tensors in one field of an item to the list `tensors`.

        Return an expression for the field's entry in the static part: True, a length, or the value.
        """
        if not leaf.is_tensor:
            return name
        if leaf.kind.schema == "Tensor[]":
            source.line(f"{tensors} += {name}")
            return f"len({name})"
        with source.condition([f"{name} is not None"] * leaf.is_optional):
            source.line(f"{tensors}.append({name})")
        return f"{name} is not None or None" if leaf.is_optional else "True"

    def _checked(self, value: Any, where: str) -> Any:
        """Check a value's type, and return the keys of a dict, or any other value unchanged."""
        if self._container is not dict:
            if isinstance(value, (list, tuple)):
                return value
            raise wrong_result(where, "a list or tuple", value)
        if not isinstance(value, dict):
            raise wrong_result(where, "a dict", value)
        for key in value:
            if not isinstance(key, str):
                raise ResultError(
                    f"{where}: the key {short_repr(key)}: expected str, got "
                    f"{types.spell(type(key))}. The function returned this value."
                )
        return tuple(value)

    def _with_index(self, error: ResultError, index: Any) -> ResultError:
        return ResultError(self._at(str(error), index))

    def _at(self, text: str, index: Any) -> str:
        """Replace `[*]`, which stands for every item of this list or dict, by an index or key."""
        return text.replace(f"{self.path}[*]", f"{self.path}[{index!r}]", 1)

    def rebuild(self, source: Source, variables: Variables) -> str:
        static, made = variables[self._static.name], source.variable(f"made_{self.path}")
        rest = source.variable("rest")
        parts = {name: source.variable(name) for name in self._names}
        source.line(f"{rest}, {made} = iter({variables.get(self._tensors.name, '()')}), []")
        with source.block(f"for {', '.join(parts.values())}, in {static}[1]:"):
            for leaf in self._leaves:
                name = parts[leaf.name]
                if leaf.kind.schema == "Tensor[]":
                    source.line(f"{name} = [next({rest}) for _ in range({name})]")
                elif leaf.is_tensor:
                    with source.condition([f"{name} is not None"] * leaf.is_optional):
                        source.line(f"{name} = next({rest})")
            source.line(f"{made}.append({self.item.rebuild(source, parts)})")
        if self._container is dict:
            return f"dict(zip({static}[0], {made}))"
        return f"tuple({made})" if self._container is tuple else made

    def gather(self, values: Mapping[str, Any]) -> Any:
        found, known = values.get(self._tensors.name), values.get(self._static.name)
        if known is None or found is None:
            return found
        keys, entries = known
        rest = iter(found)
        items = [self.item.gather(self._parts_of(entry, rest)) for entry in entries]
        return dict(zip(keys, items, strict=True)) if keys is not None else self._container(items)

    def _parts_of(self, entry: Sequence[Any], rest: Iterator[Any]) -> dict[str, Any]:
        """Return an item's parts by name, with the tensors taken from the iterator `rest`."""
        parts = dict(zip(self._names, entry, strict=True))
        for leaf in self._leaves:
            given = parts[leaf.name]
            if leaf.kind.schema == "Tensor[]":
                parts[leaf.name] = [next(rest, None) for _ in range(given)]
            else:
                parts[leaf.name] = next(rest, None) if given and leaf.is_tensor else None
        return parts

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        keys, entries = known.get(self._static.name) or (None, None)
        if isinstance(value, Mapping):
            value = list(value.values()) if keys is None else [value.get(key) for key in keys]
        if not isinstance(value, (list, tuple)):
            return {self._tensors.name: value}
        tensors: list[Any] = []
        for index, item in enumerate(value):
            entry = [None] * len(self._names) if entries is None else entries[index]
            given = dict(zip(self._names, entry, strict=True))
            parts = self.item.spread(item, given)
            for leaf in self._leaves:
                part = parts.get(leaf.name)
                if leaf.kind.schema == "Tensor[]":
                    tensors += [None] * (given[leaf.name] or 0) if part is None else part
                elif leaf.is_tensor and (
                    not leaf.is_optional or given[leaf.name] or part is not None
                ):
                    tensors.append(part)
        return {self._tensors.name: tensors}

    def _describe(self, value: Any) -> Iterator[tuple[str, Any]]:
        keys, entries = value
        count = f"a list of {len(entries)}" if keys is None else f"a dict with {keys}"
        yield self.path, Described(count)
        for index, entry in enumerate(entries):
            for place, described in self._describe_entry(entry):
                yield self._at(place, index if keys is None else keys[index]), described

    def _describe_entry(self, entry: Sequence[Any]) -> Iterator[tuple[str, Any]]:
        parts = dict(zip(self._names, entry, strict=True))
        for static in self._statics:
            yield from static.described(parts[static.name])
        for leaf in self._leaves:
            value = parts[leaf.name]
            if leaf.kind.schema == "Tensor[]":
                value = Described(f"a list of {value}")
            elif leaf.is_tensor and value:
                value = Described("a tensor")
            yield leaf.path, value
