"""Companions: operators that stand for another one in compiled graphs.

A companion is an operator like any other, with a name made from that of the operator, and ends with
it. It exists as soon as it can be needed: graphs in caches and files name it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

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
    """Defines the operator `name__kind` beside the operator `name`, whose tags it has too.

    The schema is without the name. `error` is raised if somebody else has an operator of that name.
    Rules of the user derive its values from those of the `origin`, by default the operator, and the
    `convention` says how their functions are called.
    """
    name = definition.name._replace(name=f"{definition.name.name}__{kind}")
    if operators.is_registered(name.packet, name.overload):
        raise error(
            f"{definition}: a compiled graph needs an operator {name}, but there is one already, "
            f"registered at {registration_site(name)}. Give that "
            "one another name."
        )
    # The form of an operator is not that of its companions.
    inherited = (tag for tag in definition.declaration.tags if form_of((tag,)) is Form.PLAIN)
    declaration = Declaration(
        name,
        Schema(schemas.parse(f"{name}{schema}"), f"{name.local}{schema}"),
        function,
        # That of somebody else's operator is not known to us.
        definition.declaration.site or Site(__name__, str(name), __file__, 0),
        tags=tuple(dict.fromkeys((Tag.pt2_compliant_tag, *inherited, *tags))),
        fake=fake,
        convention=convention,
        is_companion=True,
    )

    def build() -> Definition:
        companion = define(declaration)
        reason = f"{name} belongs to {definition}, which is gone."
        end_with(definition.library, companion, lambda: reason)
        follow(origin or definition, companion, kind)
        return companion

    return all_or_nothing(name, build)


def free_name(name: str, schema: Schema) -> str:
    """A name for one more argument beside those of a schema."""
    while any(argument.name == name for argument in schema.arguments):
        name += "_"
    return name
