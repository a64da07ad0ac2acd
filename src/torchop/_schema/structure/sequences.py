"""Lists, tuples and `torch.Size`: several values of one kind, in one argument."""

from __future__ import annotations

import collections.abc
import typing
from typing import Any

import torch

from torchop._errors import ArgumentValueError, short_repr
from torchop._schema.structure.kinds import Encode, Kind, single_kind, wrong_type

_LISTS = (list, collections.abc.Sequence)
# Of which a schema has lists, and files can hold them.
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


def container(annotation: Any) -> Container | None:
    """Reads `list[X]`, `Sequence[X]`, `tuple[X, ...]` and `tuple[X, X]`; None for all else."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in _LISTS and args:
        return Container(args[0])
    if origin is tuple and len(args) == 2 and args[1] is Ellipsis:
        return Container(args[0], is_tuple=True)
    if origin is tuple and args and all(item == args[0] for item in args):
        return Container(args[0], is_tuple=True, length=len(args))
    return None


def sequence_kind(annotation: Any) -> Kind | None:
    """The kind of several values of one kind; None if the annotation is no such container."""
    if annotation is torch.Size:
        # A size made of symbols is a size too.
        return Kind("SymInt[]", encode_items(_kind_of(int), None), decode=_to_size)
    held = container(annotation)
    if held is None:
        return None
    if held.item is torch.dtype:
        return _dtypes(held)
    item = single_kind(held.item)
    if item is None or item.schema not in _LISTED:
        return None
    encode = encode_items(item, held.length)
    return Kind(f"{item.schema}[]", encode, decode=_decode(held))


def _kind_of(annotation: Any) -> Kind:
    kind = single_kind(annotation)
    assert kind is not None  # asked for those in the table
    return kind


def encode_items(item: Kind, length: int | None) -> Encode:
    """Encodes the items of a list or tuple, and says which one is wrong."""
    exact, encode_item = item.exact, item.encode

    def encode(values: Any, where: str) -> list[Any]:
        if not isinstance(values, (list, tuple)):
            raise wrong_type(where, "a list or tuple", values)
        if length is not None and len(values) != length:
            raise wrong_length(where, length, values)
        encoded = []
        for index, value in enumerate(values):
            if type(value) is not exact:
                value = encode_item(value, f"{where}[{index}]")
            encoded.append(value)
        return encoded

    return encode


def _decode(held: Container) -> Encode | None:
    if not held.is_tuple:
        return None
    length = held.length

    def decode(values: Any, where: str) -> tuple[Any, ...]:
        if length is not None and len(values) != length:
            raise wrong_length(where, length, values)
        return tuple(values)

    return decode


def _dtypes(held: Container) -> Kind:
    # By name: an exported file has no lists of dtypes.
    encode_all = encode_items(_kind_of(torch.dtype), held.length)
    finish = _decode(held)

    def encode(values: Any, where: str) -> list[str]:
        return [str(value).removeprefix("torch.") for value in encode_all(values, where)]

    def decode(names: Any, where: str) -> Any:
        for name in names:
            if name not in _DTYPES:
                raise ArgumentValueError(
                    f"{where}: expected names of dtypes, such as 'float32', got {short_repr(name)}."
                )
        values = [_DTYPES[name] for name in names]
        return values if finish is None else finish(values, where)

    return Kind("str[]", encode, decode=decode)


def wrong_length(where: str, length: int, values: Any) -> ArgumentValueError:
    return ArgumentValueError(f"{where}: expected {length} items, got {len(values)}.")


def _to_size(values: Any, where: str) -> torch.Size:
    return torch.Size(values)
