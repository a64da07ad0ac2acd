"""Defining an operator of which everything was checked: all of it, or nothing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.library

from torchop._compat import handles, libraries, retirement, torch_ops
from torchop._compat.classes import Tag
from torchop._definition import Definition, Guard, Place
from torchop._errors import OperatorGoneError
from torchop._library import Library
from torchop._naming import OpName
from torchop._native import switch
from torchop._operator import CustomOp
from torchop._plan import registration_lock
from torchop._replacement import end_older
from torchop._rules.effect import Declared, EffectRule
from torchop._rules.kernels import KernelRule
from torchop._schema.schema import Schema

if TYPE_CHECKING:
    from torchop._structure.structure import Structure


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
    declared: Declared = None,
    structure: Structure | None = None,
) -> Any:
    """Defines an operator of which everything was checked, in place of what has the name now."""
    with registration_lock, retirement.replacing(name.namespace, name.name):
        end_older(name, place)
        make: Callable[..., Definition] = Definition
        if structure is not None:
            from torchop._structure.handle import StructuredDefinition

            make = functools.partial(StructuredDefinition, structure)
        definition = make(
            name,
            schema,
            Library(name.namespace, "FRAGMENT"),
            owned=True,
            home=lib,
            schema_is_inferred=schema_is_inferred,
            function=function,
            tags=tags,
            place=place,
            guard=guard,
        )
        return _build(definition, devices, declared, lib)


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


def _make_handle(definition: Definition) -> CustomOp[..., Any]:
    if definition.structure is None:
        return CustomOp(definition)
    from torchop._structure.handle import StructuredDefinition, make_handle

    assert isinstance(definition, StructuredDefinition)
    return make_handle(definition)


def _build(
    definition: Definition,
    devices: list[str | None],
    declared: Declared,
    home: torch.library.Library | None,
) -> Any:
    """Defines the operator; everything that a user can get wrong was checked before."""
    name, library = definition.name, definition.library
    assert definition.function is not None  # only operators of ours have a handle
    try:
        for rule in definition.rules.values():
            rule.install()
        definition.rule(KernelRule).register(devices, definition.function)
        # With all its kernels there already, because now other threads can find and call it.
        libraries.define(library, definition.schema.written, definition.tags)
        torch_ops.refresh_packet(name.namespace, name.name)
        for rule in definition.rules.values():
            rule.install_on_defined()
        if declared is not None:
            definition.rule(EffectRule).register(declared)
        handle = _make_handle(definition)
    except BaseException:
        # Nothing half-registered: the name is free again.
        definition.close(f"The definition of {name} failed.")
        raise
    definition.handle = handle
    switch.defined(definition)
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
