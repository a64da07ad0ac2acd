"""Lists of structures as arguments, for which the schema has one list per field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchop._errors import ArgumentError, mistake
from torchop._schema.kinds import (
    CONVERTED_ITEMS,
    DTYPE_NAME,
    Kind,
    is_object,
    unchanged,
    wrong_type,
)
from torchop._schema.structure.nodes import Leaf, Node, Variables
from torchop._schema.structure.shapes import MISSING
from torchop._schema.structure.source import Source


class Rows(Node):
    """A list of structures, such as dataclasses. The schema has one list per field, a column.

    `row` is the annotation tree of a single structure in the list. Each leaf of this tree is a
    field, and has the same name as the column with the field's values.
    """

    def __init__(self, path: str, row: Node, container: type) -> None:
        self._row = row
        self._container = container
        self._columns = [_column(leaf) for leaf in row.leaves()]
        super().__init__(path, self._columns)
        if not self._columns:
            raise mistake(f"{path} is a list of structures without fields.")

    def set_default(self, value: Any) -> None:
        if value is MISSING:
            return
        source = Source("the default", self.path, ("value",))
        variables = {column.name: source.variable(column.name) for column in self._columns}
        with source.block("def columns_of(value):"):
            self.flatten(source, "value", variables)
            source.line(f"return {', '.join(variables.values())},")
        columns = source.function("columns_of")(value)
        for column, default in zip(self._columns, columns, strict=True):
            column.set_default(default)

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        rows, row = source.variable(f"rows_of_{self.path}"), source.variable("row")
        parts = {column.name: source.variable(column.name) for column in self._columns}
        source.line(f"{rows} = []")
        checked = f"{source.object(checked_rows)}({value}, {source.where(self.path)})"
        with source.block(f"for {row} in {checked}:"):
            self._row.flatten(source, row, parts)
            source.line(f"{rows}.append(({', '.join(parts.values())},))")
        for index, column in enumerate(self._columns):
            source.line(f"{variables[column.name]} = [row[{index}] for row in {rows}]")

    def rebuild(self, source: Source, variables: Variables) -> str:
        made = source.variable(f"made_{self.path}")
        parts = {column.name: source.variable(column.name) for column in self._columns}
        columns = ", ".join(variables[column.name] for column in self._columns)
        source.line(f"{source.object(check_lengths)}({source.where(self.path)}, {columns})")
        source.line(f"{made} = []")
        with source.block(f"for {', '.join(parts.values())}, in zip({columns}):"):
            source.line(f"{made}.append({self._row.rebuild(source, parts)})")
        return f"tuple({made})" if self._container is tuple else made

    def gather(self, values: Mapping[str, Any]) -> Any:
        columns = {c.name: values.get(c.name) for c in self._columns}
        count = max((len(v) for v in columns.values() if isinstance(v, (list, tuple))), default=0)
        rows = [
            self._row.gather(
                {n: v[index] if isinstance(v, (list, tuple)) else v for n, v in columns.items()}
            )
            for index in range(count)
        ]
        return rows or None

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        if value is None:
            return {}
        rows = [self._row.spread(row, known) for row in value]
        tensors = [column.name for column in self._columns if column.is_tensor]
        return {name: [row.get(name) for row in rows] for name in tensors}


def checked_rows(value: Any, where: str) -> Any:
    if not isinstance(value, (list, tuple)):
        raise wrong_type(where, "a list or tuple", value)
    return value


def check_lengths(where: str, *columns: Sequence[Any]) -> None:
    lengths = sorted(set(map(len, columns)))
    if len(lengths) > 1:
        raise ArgumentError(f"{where}: got lists of different lengths: {lengths}.")


def _column(leaf: Leaf) -> Leaf:
    if leaf.kind.schema == "ScalarType" and not leaf.is_optional:
        leaf.kind, leaf.checked = DTYPE_NAME, True  # exporters support no lists of dtypes
    may_hold_none = leaf.kind.schema == "Tensor" or is_object(leaf.kind)
    is_supported = leaf.kind.schema in CONVERTED_ITEMS or is_object(leaf.kind)
    if not is_supported or "[" in leaf.kind.schema or (leaf.is_optional and not may_hold_none):
        raise mistake(
            f"{leaf.path} is a field of a structure in a list, but a schema has no list of its "
            f"type, {leaf.kind.schema}{'?' * leaf.is_optional}. Move it out of the list, or use a "
            "structure of lists."
        )
    kind = Kind(f"{leaf.kind.schema}{'?' * leaf.is_optional}[]", unchanged)
    return Leaf(leaf.path, leaf.name, kind)
