"""Defining an operator of which everything was checked: all of it, or nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.library

from torchop._compat import handles, libraries, retirement, torch_ops
from torchop._compat.classes import Tag
from torchop._core.definition import Definition, Guard, Place
from torchop._core.library import OwnLibrary
from torchop._core.lock import registration_lock
from torchop._core.registry import end_older
from torchop._errors import OperatorGoneError
from torchop._schema.convention import FLAT, Convention
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema


def _no_handles(definition: Definition) -> Any:
    raise RuntimeError(f"{definition} cannot be defined before torchop is imported.")


# Makes the handle of a new operator, and its calls native. Handles need all rules, so the module of
# handles puts its function here.
make_handle: Callable[[Definition], Any] = _no_handles


def define_operator(
    name: OpName,
    schema: Schema,
    function: Callable[..., Any],
    *,
    devices: list[str | None],
    tags: tuple[Tag, ...],
    lib: torch.library.Library | None,
    place: Place,
    schema_is_inferred: bool,
    guard: Guard | None = None,
    effect: Any = None,
    convention: Convention = FLAT,
) -> Any:
    """Defines an operator of which everything was checked, in place of what has the name now."""
    with registration_lock, retirement.replacing(name.namespace, name.name):
        end_older(name, place)
        definition = Definition(
            name,
            schema,
            OwnLibrary(name.namespace, "FRAGMENT"),  # type: ignore[no-untyped-call]
            owned=True,
            home=lib,
            schema_is_inferred=schema_is_inferred,
            function=function,
            tags=tags,
            devices=tuple(devices),
            place=place,
            guard=guard,
            effect=effect,
            convention=convention,
        )
        return _build(definition, lib)


def check_home(name: OpName, lib: torch.library.Library | None) -> None:
    if lib is None:
        return
    if not isinstance(lib, torch.library.Library):
        raise TypeError(f"{name}: lib expects a Library, got {type(lib).__name__}.")
    if lib.m is None:
        raise OperatorGoneError(
            f"{name}: the Library object passed as lib has been destroyed: nothing can be defined "
            "in it any more."
        )
    if lib.kind == "IMPL":
        raise ValueError(
            f"{name}: lib has the kind IMPL, which cannot define operators; use DEF or FRAGMENT."
        )
    if lib.ns != name.namespace:
        raise ValueError(
            f"{name}: lib is the library of the namespace {lib.ns!r}; name the operator "
            f"'{lib.ns}::{name.local}', or pass a library of {name.namespace!r}."
        )


def _build(definition: Definition, home: torch.library.Library | None) -> Any:
    """Defines the operator; everything that a user can get wrong was checked before."""
    name, library = definition.name, definition.library
    assert definition.function is not None  # only operators of ours have a handle
    try:
        for rule in definition.rules.values():
            rule.install()
        # With all its kernels there already, because now other threads can find and call it.
        libraries.define(library, definition.schema.written, definition.tags)
        torch_ops.refresh_packet(name.namespace, name.name)
        for rule in definition.rules.values():
            rule.install_on_defined()
        handle = make_handle(definition)
    except BaseException:
        # Nothing half-registered: the name is free again.
        definition.close(f"The definition of {name} failed.")
        raise
    handles.publish(str(name), handle, library)
    # torch.library's own custom_op, redefining the name, destroys the library it finds published.
    libraries.on_close(library, definition.end)
    if home is not None:
        closed = f"The operator {name} is gone: the library it was defined in was closed."
        alive = weakref.ref(definition)  # a replaced one must not be kept by the library

        def close() -> None:
            if (ours := alive()) is not None:
                ours.close(closed)

        libraries.on_close(home, close)
    return handle
