"""Define operators that are derived from another operator, and deregistered with it.

Users call some derived operators, such as the in-place form. The others are helper operators:
`name__kind` replaces the operator `name` in compiled graphs. They are defined as soon as the
operator is, because graphs that are loaded from a cache or file look them up by name.
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
        definition: the operator. The helper operator has the same tags.
        kind: the suffix of the name.
        schema: the schema without the name.
        function: the kernel.
        fake: the fake kernel.
        tags: additional tags.
        error: the exception to raise if another package defined an operator of this name.
        origin: the operator from which the helper operator inherits public rules (`torchop.Rule`).
            By default, this is `definition`.
        convention: the calling convention of functions that users register for the helper operator.
    """
    name = definition.name._replace(name=f"{definition.name.name}__{kind}")
    if operators.is_registered(name.packet, name.overload):
        raise error(
            f"{definition}: a compiled graph needs an operator {name}, but another library "
            f"defined one at {registration_site(name)}. Rename that operator."
        )
    # Drop tags such as torch.Tag.inplace, because a helper operator has another form.
    inherited = (tag for tag in definition.declaration.tags if form_of((tag,)) is Form.PLAIN)
    declaration = Declaration(
        name,
        Schema(schemas.parse(f"{name}{schema}"), f"{name.local}{schema}"),
        function,
        # If another package defined the operator, its source location is unknown.
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
        kind: how the operator is derived from `origin`, such as `"inplace"`. Public rules depend on
            it.
        owner: deregistering this operator also deregisters the derived one. By default, `origin`.
        lib: a library whose closing also deregisters the derived operator.
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
