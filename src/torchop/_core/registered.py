"""The table of everything that a library has registered with PyTorch for one operator.

Every kernel in the dispatcher, and every rule in PyTorch's other registries (such as a fake
kernel), has a row. These rows are all that is needed to undo a registration, deregister an
operator, roll back a definition that failed, or warn about a second registration.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch.library

from torchop._compat import libraries, registries
from torchop._core.lock import registration_lock, then_run_hooks
from torchop._errors import OperatorGoneError, Place, RedefinitionWarning, users_place, warn

# The key of a row in the table of registrations. It is a dispatch key, a mode or Tensor subclass
# with a torch_dispatch rule, or the kind of a rule, such as "fake kernel".
Key: TypeAlias = "str | type"
# The key of the row that records where `Library.define` defined an operator.
DEFINITION = "definition"


class Registered(NamedTuple):
    """One row of the table of registrations: an object in one of PyTorch's registries."""

    kernel: Any = None  # the object that PyTorch calls
    # Removes the object from its registry. None if closing the library is enough for this.
    remove: Callable[[], object] | None = None
    place: Place | None = None  # the user's line of code, for rules that a user registered


_NOTHING = Registered()


class Registrations:
    """The table of registrations (see `Registered`) for one operator in one library.

    Callers of `add`, `remove`, `remove_new`, `remove_all` and `record_place` must hold
    `registration_lock`.
    """

    __slots__ = ("__weakref__", "_rows", "is_closed", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_closed = False
        self._rows: dict[Key, Registered] = {}

    def __contains__(self, key: Key) -> bool:
        return key in self._rows

    def __iter__(self) -> Iterator[Key]:
        return iter(tuple(self._rows))  # a copy, because other threads may add rows

    def kernel(self, key: Key) -> Any:
        return self._rows.get(key, _NOTHING).kernel

    def place(self, key: Key) -> Place | None:
        return self._rows.get(key, _NOTHING).place

    def add(self, key: Key, kernel: Any, remove: Callable[[], object] | None = None) -> None:
        """Record a newly registered kernel or rule, and remove any that it replaces."""
        if self.is_closed:  # another thread has just closed the library
            if remove is not None:
                remove()
            raise OperatorGoneError(f"{self.name}: the library of this registration was closed.")
        before = self._rows.get(key, _NOTHING)
        self._rows[key] = Registered(kernel, remove, before.place)
        if before.remove is not None:
            before.remove()

    def add_default_rule(self, cls: type, function: Callable[..., Any]) -> None:
        """Register a default torch_dispatch rule, unless the class already has a rule."""
        with registration_lock:
            if cls not in self._rows:
                registries.add_default_torch_dispatch(self.name, cls, function)
                remove = registries.remove_default_torch_dispatch
                self.add(cls, function, functools.partial(remove, self.name, cls, function))

    @contextlib.contextmanager
    def registering(self, *rules: str) -> Iterator[None]:
        """Record the line of user code that registers rules in a `with` block.

        On entry, warn if another package has already registered the same rule, because otherwise
        the import order would silently decide which package's rule applies. The caller must not
        hold the registration lock.

        Args:
            rules: the kinds of the rules, such as `"fake kernel"` or `"autocast rule for cuda"`.
        """
        place = users_place()
        for rule in rules:
            before = registration_place(self.name, rule)
            if before is None or _package(before) == _package(place):
                continue
            earlier, later = (f"{each.file}:{each.line}" for each in (before, place))
            warn(
                f"{self.name}: the {rule} was registered at {earlier}, and is now replaced by "
                f"another one at {later}. The order of imports decides which one applies. Remove "
                "one of them, or register it with lib= and close that library.",
                RedefinitionWarning,
            )
        yield
        with registration_lock:
            for rule in rules:
                self.record_place(rule, place)

    def record_place(self, key: Key, place: Place) -> None:
        row = self._rows.get(key, _NOTHING)
        self._rows[key] = Registered(row.kernel, row.remove, place)
        _latest[self.name, key] = self

    def remove(self, key: Key) -> None:
        row = self._rows.get(key, _NOTHING)
        if row.remove is not None:
            row.remove()
        self._rows.pop(key, None)

    def remove_new(self, before: Collection[Key]) -> None:
        """Remove the rows that a failed registration added, i.e. all rows not in `before`.

        Rows without a `remove` function stay, and so do their kernels. This is harmless, because
        these kernels look up the operator's current rules in each call.
        """
        for key in self:
            if key not in before and self._rows[key].remove is not None:
                self.remove(key)

    def remove_all(self) -> None:
        for key in self:
            self.remove(key)

    def close(self) -> None:
        """Undo all registrations and accept no new ones, because the library is closed."""
        with then_run_hooks():
            self.is_closed = True
            self.remove_all()


# A library stores its tables of registrations in this attribute, as a dict from operator names to
# `Registrations`.
_TABLES = "_torchop_registrations"


def registrations_of(library: torch.library.Library, name: object) -> Registrations:
    """Return a library's table of registrations for an operator, creating it if necessary."""
    with registration_lock:
        tables: dict[str, Registrations] = library.__dict__.setdefault(_TABLES, {})
        table = tables.get(str(name))
        if table is None:
            table = Registrations(str(name))
            # Register this hook before storing the table. Even if Ctrl-C interrupts this function,
            # closing the library then closes the table.
            libraries.on_close(library, table.close)
            tables[str(name)] = table
        return table


# For an operator's name and the kind of a rule, find the table of the library in which a user last
# registered such a rule.
_latest: weakref.WeakValueDictionary[tuple[str, Key], Registrations] = weakref.WeakValueDictionary()


def registration_place(name: object, key: Key) -> Place | None:
    """Return the line of user code that last registered a rule of this kind for an operator.

    Ignore rules in libraries that have been closed.
    """
    table = _latest.get((str(name), key))
    return None if table is None else table.place(key)


def _package(place: Place) -> str:
    return place.module.partition(".")[0]
