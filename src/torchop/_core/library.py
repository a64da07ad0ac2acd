"""Libraries that own operators and rules. When a library is closed, both are deregistered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.library

from torchop._compat import deregistration, libraries, operators
from torchop._core.lock import registration_lock
from torchop._errors import OperatorGoneError, Place, users_place
from torchop._schema.naming import OpName


class OwnLibrary(torch.library.Library):
    """A library whose operators raise OperatorGoneError when called after the library is closed."""

    def _destroy(self) -> None:
        names = list(map(operators.parts, self._op_defs))
        with registration_lock:
            deregistration.refuse_running(names)
            deregistration.invalidate(names, libraries.library_closed_reason)
            try:
                libraries.end(self)
            finally:
                super()._destroy()  # type: ignore[no-untyped-call]


# The class that `process_library` instantiates. `_define.library` sets it to `torchop.Library`,
# because that module imports this one.
process_library_type: type[OwnLibrary] = OwnLibrary
_process_libraries: dict[str, OwnLibrary] = {}


def process_library(namespace: str) -> Any:
    """Return the library that owns registrations without `lib=`. It is never closed."""
    with registration_lock:
        if namespace not in _process_libraries:
            _process_libraries[namespace] = process_library_type(namespace, "FRAGMENT")
        return _process_libraries[namespace]


# A library stores its definitions for other packages' operators, by name, in this attribute.
DEFINITIONS = "_torchop_definitions"


def process_definitions(namespace: str) -> Mapping[str, Any]:
    """Return the definitions that `process_library` owns, by operator name.

    They store rules that were registered without `lib=` for operators of other packages.
    """
    library = _process_libraries.get(namespace)
    return {} if library is None else library.__dict__.get(DEFINITIONS, {})


def all_process_definitions() -> list[str]:
    """Return the operator names in `process_definitions`, for all namespaces."""
    return [
        name for namespace in list(_process_libraries) for name in process_definitions(namespace)
    ]


# A library stores the source locations of operators, by name, in this attribute.
_PLACES = "_torchop_places"


def record_place(library: torch.library.Library, name: OpName) -> None:
    """Record the running line of the user's code as the place that defines an operator."""
    library.__dict__.setdefault(_PLACES, {})[str(name)] = users_place()


def process_place(name: OpName) -> Place | None:
    """Return the source line that defined an operator with `torchop.define` and without `lib=`."""
    library = _process_libraries.get(name.namespace)
    places: Mapping[str, Place] = {} if library is None else vars(library).get(_PLACES, {})
    return places.get(str(name))


def check_library(what: object, lib: torch.library.Library | None) -> None:
    """Raise unless `lib` is None or an open library."""
    if lib is None:
        return
    if not isinstance(lib, torch.library.Library):
        raise TypeError(f"{what}: lib expects a Library, got {type(lib).__name__}.")
    if lib.m is None:
        raise OperatorGoneError(
            f"{what}: the Library object passed as lib has been destroyed. Pass a library that is "
            "still open."
        )


def check_callers_library(name: OpName, lib: torch.library.Library | None) -> None:
    """Raise if the operator cannot be defined in the caller's library."""
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
