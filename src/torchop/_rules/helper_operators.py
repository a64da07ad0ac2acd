"""Define operators that are derived from another operator and deregistered with it.

Users call some derived operators, such as the in-place form of a functional operator. The other
derived operators are helper operators: an operator `name__kind` replaces the operator `name` in
compiled graphs. Helper operators are defined during registration, and not when a graph is traced,
because a process may load a graph from a cache or a file without tracing it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.library

from torchop._compat import operators, schemas
from torchop._compat.classes import Tag
from torchop._core.declaration import Declaration, Site
from torchop._core.define import all_or_nothing, define, deregister_with
from torchop._core.definition import Definition
from torchop._core.registry import registration_site
from torchop._core.user_rule import follow_origin
from torchop._schema.convention import FLAT, Convention
from torchop._schema.forms import Form, form_of
from torchop._schema.schema import Schema


def define_helper_operator(
    definition: Definition,
    kind: str,
    schema: str,
    function: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    tags: Iterable[Tag] = (),
    error: type[RuntimeError] = RuntimeError,
    origin: Definition | None = None,
    convention: Convention = FLAT,
) -> Definition:
    """Define the helper operator `name__kind` of the operator `name`.

    Args:
        definition: the operator. The helper operator has the same tags, except for the tags of
            in-place and out= forms.
        kind: the suffix of the helper operator's name, such as "training".
        schema: the schema of the helper operator, without the name.
        function: the kernel.
        fake: the fake kernel.
        tags: additional tags.
        error: the type of the exception to raise if another library has already defined an operator
            of this name.
        origin: the operator from which the helper operator inherits public rules (`torchop.Rule`).
            By default, this is `definition`.
        convention: converts functions that users register for the helper operator to functions
            that take and return the values of the schema. By default, no conversion is needed.
    """
    name = definition.name._replace(name=f"{definition.name.name}__{kind}")
    if operators.is_registered(name.packet, name.overload):
        raise error(
            f"{definition}: a compiled graph needs an operator {name}, but another library "
            f"defined one at {registration_site(name)}. Rename that operator."
        )
    # Drop torch.Tag.inplace and torch.Tag.out, because a helper operator never has these forms.
    inherited = (tag for tag in definition.declaration.tags if form_of((tag,)) is Form.PLAIN)
    declaration = Declaration(
        name,
        Schema(schemas.parse(f"{name}{schema}"), f"{name.local}{schema}"),
        function,
        # If another package defined the operator, its source location is unknown, so use this file.
        definition.declaration.site or Site(__name__, str(name), __file__, 0),
        tags=tuple(dict.fromkeys((Tag.pt2_compliant_tag, *inherited, *tags))),
        fake=fake,
        convention=convention,
        is_helper=True,
    )

    return define_derived(origin or definition, declaration, kind, owner=definition)


def define_derived(
    origin: Definition,
    declaration: Declaration,
    kind: str,
    *,
    owner: Definition | None = None,
    lib: torch.library.Library | None = None,
) -> Definition:
    """Define an operator that is derived from `origin`.

    Args:
        origin: the operator from which the derived one inherits public rules, such as sharding
            rules.
        declaration: the declaration of the derived operator.
        kind: how the operator is derived from `origin`, such as `"inplace"`. A public rule may
            behave differently for each kind.
        owner: the operator that owns the derived one: deregistering the owner also deregisters the
            derived operator. By default, this is `origin`.
        lib: a library of the caller. Closing this library also deregisters the derived operator.
    """
    name, owner = declaration.name, owner or origin
    owners_name, reference = str(owner), weakref.ref(owner)

    def reason() -> str:
        text = f"{name} belongs to {owners_name}, which was deregistered."
        alive = reference()
        return f"{text} {(alive and alive.deregistration_reason) or ''}".rstrip()

    def build() -> Definition:
        derived = define(declaration, lib)
        deregister_with(owner.library, derived, reason)
        follow_origin(origin, derived, kind)
        return derived

    return all_or_nothing(name, build)


def free_name(name: str, schema: Schema) -> str:
    """Append underscores to `name` until it differs from the names of all arguments."""
    while any(argument.name == name for argument in schema.arguments):
        name += "_"
    return name
