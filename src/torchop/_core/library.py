"""Libraries that own operators and rules, and deregister them when closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.library

from torchop._compat import deregistration, libraries, operators
from torchop._core.lock import registration_lock, then_run_hooks
from torchop._errors import OperatorGoneError
from torchop._schema.naming import OpName


class OwnLibrary(torch.library.Library):
    """A library whose operators raise OperatorGoneError once the library is closed."""

    def _destroy(self) -> None:
        names = list(map(operators.parts, self._op_defs))
        with then_run_hooks():
            deregistration.refuse_running(names)
            deregistration.invalidate(names, libraries.library_closed_reason)
            try:
                libraries.end(self)
            finally:
                super()._destroy()  # type: ignore[no-untyped-call]


# The class of the libraries that `process_library` creates. `_define.library` sets this to
# `torchop.Library`, which cannot be imported here because the import would be circular.
process_library_type: type[OwnLibrary] = OwnLibrary
_process_libraries: dict[str, OwnLibrary] = {}


def process_library(namespace: str) -> Any:
    """Return the library that owns registrations made without `lib=`, and is never closed."""
    with registration_lock:
        if namespace not in _process_libraries:
            _process_libraries[namespace] = process_library_type(namespace, "FRAGMENT")
        return _process_libraries[namespace]


# A library stores its definitions for operators from other packages in this attribute, as a dict
# from operator names to definitions.
DEFINITIONS = "_torchop_definitions"


def process_definitions(namespace: str) -> Mapping[str, Any]:
    """Map operator names to the definitions in the library that is never closed.

    These definitions hold the rules that were registered without `lib=` for operators from other
    packages.
    """
    library = _process_libraries.get(namespace)
    return {} if library is None else library.__dict__.get(DEFINITIONS, {})


def all_process_definitions() -> list[str]:
    # Copy each dict before iterating, because another thread may add a definition.
    return [
        name
        for namespace in list(_process_libraries)
        for name in list(process_definitions(namespace))
    ]


def check_library(what: object, lib: torch.library.Library | None) -> None:
    if lib is None:
        return
    if not isinstance(lib, torch.library.Library):
        raise TypeError(f"{what}: lib expects a Library, got {type(lib).__name__}.")
    if lib.m is None:
        raise OperatorGoneError(
            f"{what}: the Library object passed as lib has been destroyed. Pass a library that is "
            "still open."
        )


def new_name(text: object, lib: torch.library.Library | None) -> OpName:
    """Parse the name of a new operator, and check that `lib` can define the operator."""
    name = OpName.parse_new(text)
    check_library(name, lib)
    if lib is None:
        return name
    if lib.kind == "IMPL":
        raise ValueError(
            f"{name}: lib has the kind IMPL, which cannot define operators; use DEF or FRAGMENT."
        )
    if lib.ns != name.namespace:
        raise ValueError(
            f"{name}: lib is the library of the namespace {lib.ns!r}; name the operator "
            f"'{lib.ns}::{name.local}', or pass a library of {name.namespace!r}."
        )
    return name
