from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchop._errors import ArgumentError, short_repr
from torchop._schema.kinds import Container, Kind, check_length, list_of, wrong_type


def mapping(item: Kind) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: one splits a dict into keys and values, and one rebuilds the dict."""
    exact, encode_item = item.exact, item.encode

    def encode(value: Any, where: str) -> tuple[list[str], list[Any]]:
        if not isinstance(value, dict):
            raise wrong_type(where, "a dict", value)
        keys, values = [], []
        for key, entry in value.items():
            if not isinstance(key, str):
                raise wrong_type(f"{where}: the key {short_repr(key)}", "str", key)
            if type(entry) is not exact:
                entry = encode_item(entry, f"{where}[{short_repr(key)}]")
            keys.append(key)
            values.append(entry)
        return keys, values

    def decode(keys: Any, values: Any, where: str) -> dict[str, Any]:
        if len(keys) != len(values):
            raise ArgumentError(f"{where}: got {len(keys)} keys for {len(values)} values.")
        return dict(zip(keys, values, strict=True))

    return encode, decode


def nested(
    outer: Container, inner: Container, item: Kind
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return two functions: one flattens a list of lists, and one rebuilds the list of lists.

    The first returns all items as one list, and a second list with the length of each inner list.
    """
    encode_rows = list_of(list_of(item, inner.length), outer.length).encode
    row_type: type = tuple if inner.is_tuple else list
    result_type: type = tuple if outer.is_tuple else list

    def encode(value: Any, where: str) -> tuple[list[Any], list[int]]:
        rows = encode_rows(value, where)
        return [item for row in rows for item in row], [len(row) for row in rows]

    def decode(values: Any, lengths: Any, where: str) -> Any:
        if sum(lengths) != len(values) or any(length < 0 for length in lengths):
            raise ArgumentError(
                f"{where}: the lengths {list(lengths)} do not add up to {len(values)} values."
            )
        rows: list[Any] = []
        start = 0
        for length in lengths:
            row = values[start : start + length]
            check_length(row, inner.length, f"{where}[{len(rows)}]")
            rows.append(row_type(row))
            start += length
        check_length(rows, outer.length, where)
        return result_type(rows)

    return encode, decode
