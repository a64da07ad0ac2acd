"""Lists of structures as arguments. The schema has one list for each field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torchop._errors import ArgumentError, SchemaError
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
    """A list of structures (the rows). Each leaf is a column: the list of one field of all rows.

    `row` describes a single row, and its leaves have the same names as the columns.
    """

    def __init__(self, op: str, path: str, row: Node, container: type) -> None:
        self._row = row
        self._container = container
        self._columns = [_column(op, leaf) for leaf in row.leaves()]
        super().__init__(op, path, self._columns)
        if not self._columns:
            raise SchemaError(f"{self.where} is a list of structures without fields.")
        self._split, self._join = self._functions()

    def _functions(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Generate the functions that split a row into leaves and rebuild a row from leaves."""
        names = [leaf.name for leaf in self._row.leaves()]
        split = Source(f"rows of {self.where}", ("row",))
        variables = {name: split.variable(name) for name in names}
        with split.block("def split(row):"):
            self._row.flatten(split, "row", variables)
            split.line(f"return {''.join(f'{variables[name]}, ' for name in names)}")
        join = Source(f"rebuilt rows of {self.where}", names)
        with join.block(f"def join({', '.join(names)}):"):
            join.line(f"return {self._row.rebuild(join, {name: name for name in names})}")
        return split.function("split"), join.function("join")

    def set_default(self, value: Any) -> None:
        if value is MISSING:
            return
        rows = [self._split(row) for row in checked_rows(value, f"{self.where}: the default")]
        for index, column in enumerate(self._columns):
            column.set_default([row[index] for row in rows])

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        rows = source.variable(f"rows_of_{self.path}")
        check, split = source.object(checked_rows), source.object(self._split, "split")
        source.line(f"{rows} = [{split}(row) for row in {check}({value}, {self.where!r})]")
        for index, column in enumerate(self._columns):
            source.line(f"{variables[column.name]} = [row[{index}] for row in {rows}]")

    def rebuild(self, source: Source, variables: Variables) -> str:
        local = source.variable(f"made_{self.path}")
        rebuild = source.object(self._rebuilt, f"rows_of_{self.path}")
        columns = ", ".join(variables[column.name] for column in self._columns)
        source.line(f"{local} = {rebuild}({columns})")
        return local

    def _rebuilt(self, *columns: Sequence[Any]) -> Any:
        lengths = sorted(set(map(len, columns)))
        if len(lengths) > 1:
            raise ArgumentError(f"{self.where}: got lists of different lengths: {lengths}.")
        return self._container(map(self._join, *columns))

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


def _column(op: str, leaf: Leaf) -> Leaf:
    if leaf.kind.schema == "ScalarType" and not leaf.is_optional:
        leaf.kind, leaf.checked = DTYPE_NAME, True  # exporters support no lists of dtypes
    may_hold_none = leaf.kind.schema == "Tensor" or is_object(leaf.kind)
    is_supported = leaf.kind.schema in CONVERTED_ITEMS or is_object(leaf.kind)
    if not is_supported or "[" in leaf.kind.schema or (leaf.is_optional and not may_hold_none):
        raise SchemaError(
            f"{op}: {leaf.path} is a field of a structure in a list, but a schema has no list of "
            f"its type, {leaf.kind.schema}{'?' * leaf.is_optional}. Move it out of the list, or "
            "use a structure of lists."
        )
    kind = Kind(f"{leaf.kind.schema}{'?' * leaf.is_optional}[]", unchanged)
    return Leaf(op, leaf.path, leaf.name, kind)
