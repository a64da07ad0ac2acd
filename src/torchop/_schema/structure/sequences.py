"""Lists, tuples and `torch.Size`: several values of one kind, in one argument."""

from __future__ import annotations

import typing
from typing import Any

import torch

from torchop._errors import ArgumentValueError, short_repr
from torchop._schema import types
from torchop._schema.structure.kinds import KINDS, Encode, Kind, single_kind, wrong_type

# The types of which a schema has lists, and exported files can hold them.
_LISTED = frozenset({"Tensor", "SymInt", "float", "bool", "str"})
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class Container(typing.NamedTuple):
    """What holds the items: a `list` or a `tuple`, of so many items if their number is fixed."""

    item: Any
    is_tuple: bool = False
    length: int | None = None


def read_container(annotation: Any) -> Container | None:
    """Reads `list[X]`, `Sequence[X]`, `tuple[X, ...]` and `tuple[X, X]`; None for all else."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in types.SEQUENCES and args:
        return Container(args[0])
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return Container(args[0], is_tuple=True)
    if origin is tuple and args and all(item == args[0] for item in args):
        return Container(args[0], is_tuple=True, length=len(args))
    return None


def sequence_kind(annotation: Any) -> Kind | None:
    """The kind of several values of one kind; None if the annotation is no such container."""
    if annotation is torch.Size:
        # Its numbers may be symbols.
        return list_of(KINDS[int])._replace(decode=lambda sizes, where: torch.Size(sizes))
    container = read_container(annotation)
    if container is None:
        return None
    item = _DTYPE_NAME if container.item is torch.dtype else single_kind(container.item)
    if item is None or item.schema not in _LISTED:
        return None
    return list_of(item, container.length)._replace(decode=_decode(item, container))


def list_of(item: Kind, length: int | None = None) -> Kind:
    """The kind of a list of values of one kind, as many as `length` says."""
    exact, encode_item = item.exact, item.encode

    def encode(values: Any, where: str) -> list[Any]:
        if not isinstance(values, (list, tuple)):
            raise wrong_type(where, "a list or tuple", values)
        check_length(values, length, where)
        items = []
        for index, value in enumerate(values):
            if type(value) is not exact:
                value = encode_item(value, f"{where}[{index}]")
            items.append(value)
        return items

    return Kind(f"{item.schema}[]", encode)


def _decode(item: Kind, container: Container) -> Encode | None:
    decode_item, is_tuple, length = item.decode, container.is_tuple, container.length
    if decode_item is None and not is_tuple:
        return None

    def decode(values: Any, where: str) -> list[Any] | tuple[Any, ...]:
        check_length(values, length, where)
        if decode_item is not None:
            values = [decode_item(value, where) for value in values]
        return tuple(values) if is_tuple else values

    return decode


def check_length(values: Any, length: int | None, where: str) -> None:
    """Refuses a container with another number of items, if their number is fixed."""
    if length is not None and len(values) != length:
        raise ArgumentValueError(f"{where}: expected {length} items, got {len(values)}.")


def _encode_dtype(value: Any, where: str) -> str:
    return str(KINDS[torch.dtype].encode(value, where)).removeprefix("torch.")


def _decode_dtype(name: Any, where: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ArgumentValueError(
            f"{where}: expected names of dtypes, such as 'float32', got {short_repr(name)}."
        )
    return _DTYPES[name]


# By name: an exported file has no lists of dtypes.
_DTYPE_NAME = Kind("str", _encode_dtype, decode=_decode_dtype)
