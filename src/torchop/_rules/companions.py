"""Helper operators, defined for another operator and deregistered together with it.

The forms of an operator are helpers that users call. A companion replaces the operator in compiled
graphs, under a derived name. It is defined before any graph needs it, because graphs in caches and
files refer to it by name.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch.library

from torchop._compat import operators, schemas
from torchop._compat.classes import Tag
from torchop._core.declaration import Declaration, Site
from torchop._core.define import all_or_nothing, define, end_with
from torchop._core.definition import Definition
from torchop._core.registry import registration_site
from torchop._core.user_rule import follow
from torchop._schema.convention import FLAT, Convention
from torchop._schema.forms import Form, form_of
from torchop._schema.schema import Schema


def define_companion(
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
    """Define the companion `name__kind` of the operator `name`.

    Args:
        definition: the operator; the companion gets the same tags.
        kind: the suffix of the name.
        schema: the schema without the name.
        function: the kernel.
        fake: the fake kernel.
        tags: more tags.
        error: the exception to raise if another package has an operator of that name.
        origin: the operator from whose public rules the companion derives its own; by default
            `definition`.
        convention: how to call functions that users register for the companion.
    """
    name = definition.name._replace(name=f"{definition.name.name}__{kind}")
    if operators.is_registered(name.packet, name.overload):
        raise error(
            f"{definition}: a compiled graph needs an operator {name}, but another library "
            f"defined one at {registration_site(name)}. Rename that operator."
        )
    # Drop tags such as torch.Tag.inplace, because a companion has another form.
    inherited = (tag for tag in definition.declaration.tags if form_of((tag,)) is Form.PLAIN)
    declaration = Declaration(
        name,
        Schema(schemas.parse(f"{name}{schema}"), f"{name.local}{schema}"),
        function,
        # The site of another package's operator is unknown.
        definition.declaration.site or Site(__name__, str(name), __file__, 0),
        tags=tuple(dict.fromkeys((Tag.pt2_compliant_tag, *inherited, *tags))),
        fake=fake,
        convention=convention,
        is_companion=True,
    )

    return define_helper(origin or definition, declaration, kind, owner=definition)


def define_helper(
    origin: Definition,
    declaration: Declaration,
    kind: str,
    *,
    owner: Definition | None = None,
    lib: torch.library.Library | None = None,
) -> Definition:
    """Define a helper operator.

    Args:
        origin: the operator from whose public rules the helper derives its own.
        declaration: the helper.
        kind: the relation of the helper to `origin`, for public rules.
        owner: the operator with which the helper is deregistered; by default `origin`.
        lib: the caller's library that owns the helper.
    """
    name, owner = declaration.name, owner or origin
    owners_name, reference = str(owner), weakref.ref(owner)

    def reason_gone() -> str:
        reason = f"{name} belongs to {owners_name}, which was deregistered."
        ended = reference()
        return f"{reason} {(ended and ended.reason_gone) or ''}".rstrip()

    def build() -> Definition:
        helper = define(declaration, lib)
        end_with(owner.library, helper, reason_gone)
        follow(origin, helper, kind)
        return helper

    return all_or_nothing(name, build)


def free_name(name: str, schema: Schema) -> str:
    """Return `name`, with underscores appended until no argument of the schema has it."""
    while any(argument.name == name for argument in schema.arguments):
        name += "_"
    return name
