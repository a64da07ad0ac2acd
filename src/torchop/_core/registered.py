"""Record where rules are registered, to warn if two packages register the same rule."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch.library

from torchop._errors import Place, RedefinitionWarning, users_place, warn


class Registered(NamedTuple):
    """The source location of a registration, and the library that owns the rule."""

    place: Place
    library: weakref.ref[torch.library.Library]

    @property
    def is_current(self) -> bool:
        library = self.library()
        return library is not None and library.m is not None


# The keys are an operator's name and a description of the rule, unique within the operator.
_rows: dict[tuple[str, str], Registered] = {}


class Registering:
    """Record the source location of the rules that a `with` block registers.

    Creating it warns if another package has registered the same rule, because the later of two
    imports would silently decide which one applies. The caller must not hold the registration lock.

    Args:
        name: the operator.
        rules: the kinds of the rules, such as `"fake kernel"`, with a device type if there is one.
        library: the library that owns the registration.
    """

    # A generator with `contextlib.contextmanager` would make `users_place` return a line of
    # contextlib.
    def __init__(self, name: object, rules: Iterable[str], library: torch.library.Library) -> None:
        self._keys = [(str(name), rule) for rule in rules]
        forget = functools.partial(_forget, self._keys)
        self._row = Registered(users_place(), weakref.ref(library, forget))
        place = self._row.place
        for key in self._keys:
            before = _rows.get(key)
            if before is None or not before.is_current or _package(before.place) == _package(place):
                continue
            earlier, later = (f"{each.file}:{each.line}" for each in (before.place, place))
            warn(
                f"{name}: the {key[1]} was registered at {earlier}, and is now replaced by another "
                f"one at {later}. The order of imports decides which one applies. Remove one of "
                "them, or register it with lib= and close that library.",
                RedefinitionWarning,
            )

    def __enter__(self) -> None:
        """Enter the block. The constructor has already checked for duplicates."""

    def __exit__(self, error: type[BaseException] | None, *rest: object) -> None:
        if error is None:
            _rows.update(dict.fromkeys(self._keys, self._row))


def _forget(keys: list[tuple[str, str]], library: weakref.ref[torch.library.Library]) -> None:
    """Remove the rows of a library that was freed. Finalizers run this, so it takes no lock."""
    for key in keys:
        row = _rows.get(key)
        if row is not None and row.library is library:
            _rows.pop(key, None)


def _package(place: Place) -> str:
    return place.module.partition(".")[0]
