"""The libraries of operators: one per operator, those of callers, and one per namespace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.library

from torchop._compat import deregistration, libraries, operators
from torchop._core.lock import registration_lock
from torchop._errors import OperatorGoneError, Place, users_place
from torchop._schema.naming import OpName


class OwnLibrary(torch.library.Library):
    """A library of ours: when it goes, whoever still holds its operators gets an error."""

    def _destroy(self) -> None:
        names = list(map(operators.parts, self._op_defs))
        with registration_lock:
            deregistration.refuse_running(names)
            deregistration.retire(names, libraries.gone_with_library)
            try:
                libraries.end(self)
            finally:
                super()._destroy()  # type: ignore[no-untyped-call]


# The class of the libraries below, which `torchop.Library` replaces when it is imported.
process_library_type: type[OwnLibrary] = OwnLibrary
_process_libraries: dict[str, OwnLibrary] = {}


def process_library(namespace: str) -> Any:
    """The library of a namespace for what is registered without one of the caller's.

    It stays for the life of the process.
    """
    with registration_lock:
        if namespace not in _process_libraries:
            _process_libraries[namespace] = process_library_type(namespace, "FRAGMENT")
        return _process_libraries[namespace]


# The attribute of a library with what is registered through it, for the operators of others.
DEFINITIONS = "_torchop_definitions"


def process_definitions(namespace: str) -> Mapping[str, Any]:
    """What is registered without a library of the caller's, for the operators of others."""
    library = _process_libraries.get(namespace)
    return {} if library is None else library.__dict__.get(DEFINITIONS, {})


def all_process_definitions() -> list[str]:
    """The names of all operators that `process_definitions` knows."""
    return [
        name for namespace in list(_process_libraries) for name in process_definitions(namespace)
    ]


# The attribute of a library with the places where its operators were defined, by name.
_PLACES = "_torchop_places"


def note_place(library: torch.library.Library, name: OpName) -> None:
    """Remember the line of the user's program that defines an operator."""
    library.__dict__.setdefault(_PLACES, {})[str(name)] = users_place()


def process_place(name: OpName) -> Place | None:
    """The line that defined an operator without a library of the caller's; None if none did."""
    library = _process_libraries.get(name.namespace)
    places: Mapping[str, Place] = {} if library is None else vars(library).get(_PLACES, {})
    return places.get(str(name))


def check_library(what: object, lib: torch.library.Library | None) -> None:
    """Refuses what is neither an open library nor None."""
    if lib is None:
        return
    if not isinstance(lib, torch.library.Library):
        raise TypeError(f"{what}: lib expects a Library, got {type(lib).__name__}.")
    if lib.m is None:
        raise OperatorGoneError(
            f"{what}: the Library object passed as lib has been destroyed: nothing can be defined "
            "in it, or registered through it, any more."
        )


def check_callers_library(name: OpName, lib: torch.library.Library | None) -> None:
    """Refuses a library of the caller's in which the operator cannot be defined."""
    check_library(name, lib)
    if lib is None:
        return
    if lib.kind == "IMPL":
        raise ValueError(
            f"{name}: lib has the kind IMPL, which cannot define operators; use DEF or FRAGMENT."
        )
    if lib.ns != name.namespace:
        raise ValueError(
            f"{name}: lib is the library of the namespace {lib.ns!r}; name the operator "
            f"'{lib.ns}::{name.local}', or pass a library of {name.namespace!r}."
        )
