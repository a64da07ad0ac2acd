"""Define operators that are derived from another operator and deregistered with it.

Users call some derived operators, such as the in-place form of a functional operator. The other
derived operators are helper operators: an operator `name__kind` replaces the operator `name` in
compiled graphs. Helper operators are defined during registration, and not when a graph is traced,
because a process may load a graph from a cache or a file without tracing it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch.library

from torchop._compat import operators, schemas
from torchop._compat.classes import Tag
from torchop._core.declaration import Declaration, Site
from torchop._core.define import all_or_nothing, define, deregister_with
from torchop._core.definition import Definition
from torchop._core.registry import registration_site
from torchop._core.user_rule import follow_origin
from torchop._errors import SchemaError
from torchop._schema.convention import FLAT, Convention
from torchop._schema.forms import Form, form_of
from torchop._schema.layouts import Layout
from torchop._schema.schema import MAX_ARGUMENTS, Schema


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
    inlined: Any = None,
    layouts: Mapping[str, Layout] = MappingProxyType({}),
) -> Definition:
    """Define the helper operator `name__kind` of the operator `name`.

    It has the same tags, except for the tags of in-place and out= forms. If another library has
    already defined an operator of this name, raise `error`. The helper operator inherits public
    rules (`torchop.Rule`) from `origin`. `convention` converts functions that users register for
    the helper operator to functions that take and return the values of the schema. The compilers
    in `inlined` trace `function` instead of the helper operator.
    """
    name = definition.name._replace(name=f"{definition.name.name}__{kind}")
    if operators.is_registered(name.packet, name.overload):
        raise error(
            f"{definition}: a compiled graph needs an operator {name}, but another library "
            f"defined one at {registration_site(name)}. Rename that operator."
        )
    inherited = (tag for tag in definition.declaration.tags if form_of((tag,)) is Form.PLAIN)
    declaration = Declaration(
        name,
        Schema(schemas.parse(f"{name}{schema}"), f"{name.local}{schema}"),
        function,
        definition.declaration.site or Site(__name__, str(name), __file__, 0),
        tags=tuple(dict.fromkeys((Tag.pt2_compliant_tag, *inherited, *tags))),
        fake=fake,
        inlined=inlined,
        convention=convention,
        layouts=layouts,
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
    """Define an operator that is derived from `origin` and inherits its public rules.

    A public rule, such as a sharding rule, may behave differently for each `kind`, such as
    `"inplace"`. Deregistering `owner`, or closing `lib`, also deregisters the derived operator.
    """
    name, owner = declaration.name, owner or origin
    count = len(declaration.schema.arguments)
    if count > MAX_ARGUMENTS:
        raise SchemaError(
            f"{owner}: this needs an operator {name} with {count} arguments, but PyTorch takes at "
            f"most {MAX_ARGUMENTS}. Pass values of one type as a list, or write a formula with "
            "register_autograd."
        )
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
    while any(argument.name == name for argument in schema.arguments):
        name += "_"
    return name
