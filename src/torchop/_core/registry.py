"""Any way of naming an operator, resolved to its definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch.library

from torchop._compat import handles, libraries, operators, retirement, torch_ops
from torchop._compat.classes import CustomOpDef, OpOverload, OpOverloadPacket
from torchop._core.definition import Definition, Place
from torchop._core.lock import registration_lock
from torchop._errors import OperatorGoneError, OperatorNotFoundError, RedefinitionWarning, warn
from torchop._schema import naming
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

OpLike: TypeAlias = "str | CustomOpDef | OpOverload | OpOverloadPacket"

# Registrations for other people's operators, made without a library of the caller's, stay for the
# life of the process: one library per namespace holds them.
_process_libraries: dict[str, torch.library.Library] = {}


def resolve(op: OpLike, caller: str, lib: torch.library.Library | None = None) -> Definition:
    """Returns the definition on which a registration for `op` acts.

    Args:
        op: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or an `OpOverloadPacket`
            with exactly one overload.
        caller: the function on whose behalf, for messages.
        lib: the library that is to hold the registration. An operator of ours is registered on
            itself unless the library is another one than it lives in.

    Raises:
        OperatorNotFoundError: nobody defined an operator of this name.
        OperatorGoneError: the handle's operator was replaced or closed.
        ValueError: `op` is none of the above.
    """
    name = op_name(op, caller)
    own = own_definition(op, name)
    if own is not None and (lib is None or lib is own.home):
        if own.gone is not None:
            raise OperatorGoneError(own.gone)
        return own
    if lib is not None and lib.m is None:
        raise OperatorGoneError(
            f"{caller}({name}): the Library object passed as lib has been destroyed: nothing can "
            "be registered through it any more."
        )
    with registration_lock:
        return _in_library(name, _process_library(name.namespace) if lib is None else lib)


def op_name(op: OpLike, caller: str) -> OpName:
    """The name of an operator given in any of the accepted ways."""
    if isinstance(op, str):
        return naming.parse(op)
    if isinstance(op, CustomOpDef):
        return naming.parse(op._qualname)
    if isinstance(op, OpOverload):
        if torch_ops.is_retired(op):
            raise OperatorGoneError(
                f"{caller}({op}): this overload belongs to an operator that was destroyed or "
                f"replaced; look it up again, torch.ops.{op}."
            )
        return naming.parse(op._name)
    if isinstance(op, OpOverloadPacket):
        overloads = op.overloads()
        if len(overloads) != 1:
            raise ValueError(
                f"{caller}({op}): the packet has the overloads {', '.join(overloads)}; pass one of "
                f"them, such as {op}.{overloads[0] if overloads else 'default'}."
            )
        return op_name(getattr(op, overloads[0]), caller)
    raise ValueError(
        f"{caller}({op!r}): got unexpected type for op: {type(op).__name__}; expected a handle, a "
        "name such as 'mylib::crop', an OpOverload, or an OpOverloadPacket with one overload."
    )


def own_definition(op: Any, name: OpName) -> Definition | None:
    """The definition of an operator made by torchop's custom_op; None for all others."""
    handle = op if isinstance(op, CustomOpDef) else handles.published_handle(str(name))
    definition = getattr(handle, "_definition", None)
    return definition if isinstance(definition, Definition) else None


def own_definitions() -> dict[str, Definition]:
    """All operators made by torchop's custom_op that are alive, by name."""
    found = {}
    for name, handle in handles.published_handles().items():
        definition = getattr(handle, "_definition", None)
        if isinstance(definition, Definition):
            found[name] = definition
    return found


def find_schema(name: OpName) -> Schema:
    """The schema of an operator that somebody defined.

    Raises:
        OperatorNotFoundError: nobody did.
    """
    if not operators.is_registered(name.packet, name.overload):
        raise OperatorNotFoundError(
            f"the operator {name} does not exist. Import the module that defines it first, or "
            f"check the spelling."
        )
    return Schema(operators.registered_schema(name.packet, name.overload))


def _process_library(namespace: str) -> torch.library.Library:
    if namespace not in _process_libraries:
        _process_libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _process_libraries[namespace]


def _in_library(name: OpName, library: torch.library.Library) -> Definition:
    """The definition that collects what a library registers for an operator it need not own."""
    schema = find_schema(name)
    # Kept on the library itself, so that they go together.
    definitions: dict[str, Definition] = library.__dict__.setdefault("_torchop_definitions", {})
    known = definitions.get(str(name))
    if known is None or known.schema.text != schema.text:
        if known is not None:
            for rule in known.rules.values():
                rule.retract()
        known = Definition(name, schema, library, owned=False)
        definitions[str(name)] = known
    return known


def place_of(function: Callable[..., Any], module: str, file: str, line: int) -> Place:
    """Where an operator is defined: at its function, or else in the line that makes it one."""
    code = getattr(function, "__code__", None)
    if code is not None:
        file, line = code.co_filename, code.co_firstlineno
    qualname = getattr(function, "__qualname__", None)
    if qualname is None:
        # A partial or a callable object: its module is that of its class, and says nothing of it.
        return Place(module, f"line {line}", file, line)
    return Place(getattr(function, "__module__", None) or module, qualname, file, line)


def end_older(name: OpName, place: Place) -> None:
    """Ends the operator that has the name now, if `custom_op` made it.

    Raises:
        RuntimeError: it was made by other means, which may not expect it to disappear.
    """
    check_free(name, place)
    qualname = str(name)
    old = own_definition(None, name)
    library = handles.published_library(qualname)
    if old is not None and old.place is not None:
        if old.place.origin != place.origin:
            warn(
                f"{qualname} was defined at {old.place} and is defined again at {place}, which "
                "replaces it. Give one of them another name.",
                RedefinitionWarning,
            )
        old.close(
            f"This is a handle of the {qualname} that was defined at {old.place}. It was replaced "
            f"by the definition at {place}; use that one."
        )
    elif library is not None and library.m is not None:
        warn(
            f"{qualname} was defined with torch.library.custom_op and is defined again at {place}, "
            "which replaces it. Give one of them another name.",
            RedefinitionWarning,
        )
        replaced = f"{qualname} was replaced by the definition at {place}; use that one."
        with retirement.emptied([name], lambda qualname: replaced):
            handles.unpublish(qualname, library)
            libraries.forget_definitions(library)
            library._destroy()


def check_free(name: OpName, place: Place) -> None:
    """Refuses a name whose operator was not made by `custom_op`, which may not expect its end.

    Raises:
        RuntimeError: naming where it was defined.
    """
    own = own_definition(None, name)
    library = handles.published_library(str(name))
    replaceable = (own is not None and own.place is not None) or (
        library is not None and library.m is not None
    )
    if not replaceable and operators.is_registered(name.packet, name.overload):
        site = operators.registration_site(name.packet, name.overload)
        raise RuntimeError(
            f"{name} cannot be defined at {place}: it exists already, registered at {site}. Give "
            "one of them another name."
        )
