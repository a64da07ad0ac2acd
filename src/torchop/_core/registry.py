"""Look up the definition of an operator from a handle, a name, an OpOverload or a packet.

`replace` redefines an operator: it gives the operator's name to a new definition.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch.library

from torchop._compat import libraries, operators, registries, torch_ops
from torchop._compat.classes import CustomOpDef, OpOverload, OpOverloadPacket
from torchop._core.declaration import Declaration, Site
from torchop._core.definition import NOTHING, Definition
from torchop._core.library import (
    DEFINITIONS,
    all_process_definitions,
    process_definitions,
    process_library,
)
from torchop._core.lock import registration_lock, run_waiting_hooks, then_run_hooks
from torchop._core.registered import DEFINITION, registration_place, registrations_of
from torchop._errors import (
    OperatorGoneError,
    OperatorNameError,
    OperatorNotFoundError,
    RedefinitionWarning,
    nearest,
    short_repr,
    short_text,
    warn,
)
from torchop._schema.forms import Form, form_of_schema
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema
from torchop._schema.signatures import spell_function


class Handle(CustomOpDef):
    """The base class of operator handles, i.e. of the objects that users call."""

    _definition: Definition


OpLike: TypeAlias = "str | CustomOpDef | OpOverload | OpOverloadPacket"


def resolve(op: OpLike, caller: str, lib: torch.library.Library | None = None) -> Definition:
    """Return the definition in which to store a new registration for an operator.

    `lib` is the library that owns the registration. The default is the operator's own library or,
    for an operator from another package, a library that is never closed.
    """
    run_waiting_hooks()
    if isinstance(op, Handle):  # a fast path, for registrations through the methods of a handle
        op._definition.check_defined()
        if lib is None:
            return op._definition
    name = op_name(op, caller)
    check_library(f"{caller}({name})", lib)
    definition = own_definition(op, name)
    if definition is not None and (lib is None or lib is definition.callers_library):
        definition.check_defined()
        return definition
    with registration_lock:
        return _in_library(name, process_library(name.namespace) if lib is None else lib)


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


def check_owner(name: OpName, lib: torch.library.Library | None) -> None:
    """Raise if `lib` cannot define an operator with this name."""
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


def op_name(op: OpLike, caller: str) -> OpName:
    """Return an operator's name. If `op` is invalid, the error message starts with `caller`."""
    if isinstance(op, str):
        return OpName.parse(op)
    if isinstance(op, CustomOpDef):
        return OpName.parse(op._qualname)
    if isinstance(op, OpOverload):
        if torch_ops.is_deregistered(op):
            raise OperatorGoneError(
                f"{caller}({op}): this overload belongs to an operator that was destroyed or "
                f"replaced; look it up again, torch.ops.{op}."
            )
        return OpName.parse(op._name)
    if isinstance(op, OpOverloadPacket):
        overloads = op.overloads()
        if len(overloads) != 1:
            raise OperatorNameError(
                f"{caller}({op}): the packet has the overloads {', '.join(overloads)}; pass one of "
                f"them, such as {op}.{overloads[0] if overloads else 'default'}."
            )
        return op_name(getattr(op, overloads[0]), caller)
    raise _no_operator(op, caller)


def _no_operator(value: object, caller: str) -> OperatorNameError:
    if inspect.isroutine(value):
        return OperatorNameError(
            f"{caller}({spell_function(value)}): got unexpected type for op: "
            f"{type(value).__name__}; expected an operator. Pass a name, an OpOverload, or the "
            f"handle that custom_op returned, as the first argument: {caller}('mylib::crop', ...)."
        )
    return OperatorNameError(
        f"{caller}({short_repr(value)}): got unexpected type for op: {type(value).__name__}; "
        "expected a handle, a name such as 'mylib::crop', an OpOverload, or an OpOverloadPacket "
        "with one overload."
    )


def own_definition(op: Any, name: OpName) -> Definition | None:
    """Return an operator's `Definition`, or None if torchop's `custom_op` did not create it."""
    handle = op if isinstance(op, CustomOpDef) else registries.published_handle(str(name))
    return handle._definition if isinstance(handle, Handle) else None


def overload_of(op: OpLike, caller: str) -> OpOverload:
    """Return an operator's current OpOverload. Raise if the operator was deregistered."""
    name = op_name(op, caller)
    definition = own_definition(op, name)
    if definition is not None:
        definition.check_defined()
        return definition.overload
    find_schema(name)  # raises if the operator does not exist
    return torch_ops.lookup_overload(*name)


def own_definitions() -> dict[str, Definition]:
    """Map the names of torchop's operators to their definitions."""
    handles = registries.published_handles()
    found = (handle._definition for handle in handles if isinstance(handle, Handle))
    return {str(each): each for each in found if each.deregistration_reason is None}


def definitions_of(name: OpName) -> list[Definition]:
    """Return an operator's definitions, except those that belong to a library passed as `lib=`."""
    own = own_definition(None, name)
    registered = process_definitions(name.namespace).get(str(name))
    return [each for each in (own, registered) if each is not None]


def known_names() -> set[str]:
    published = (handle._qualname for handle in registries.published_handles())
    return {*published, *all_process_definitions()}


def find_schema(name: OpName) -> Schema:
    if not operators.is_registered(name.packet, name.overload):
        raise OperatorNotFoundError(f"the operator {short_text(name)} does not exist{_hint(name)}")
    parsed = operators.registered_schema(name.packet, name.overload)
    # Only count an operator as in-place or out= if both its tag and its schema say so, because
    # PyTorch also puts these tags on operators with other schemas, for example on operators that
    # write into a list.
    form = form_of_schema(parsed)
    tags = () if form is Form.PLAIN else operators.registered_tags(name.packet, name.overload)
    is_tagged = not set(form.tags).isdisjoint(tags)
    return Schema(parsed, form=form if is_tagged else Form.PLAIN)


def _hint(name: OpName) -> str:
    known = [each for each in operators.all_operators() if each.startswith(f"{name.namespace}::")]
    if known:
        return (
            f"{nearest(name, known)}. Import the module that defines it first, or check the "
            "spelling."
        )
    return (
        f": nothing is registered in the namespace {short_repr(name.namespace)}. Import the module "
        "that defines it first, or check the spelling. If the module is imported, its library may "
        "have failed to load: load it with torch.ops.load_library, which raises the reason."
    )


def registration_site(name: OpName) -> str:
    """Return the file and line where an operator was defined, or "(unknown)".

    The dispatcher's own record is only a last resort, because it names the line that created the
    library, which may be inside torchop or PyTorch.
    """
    definition = own_definition(None, name)
    if definition is not None and definition.declaration.site is not None:
        return str(definition.declaration.site)
    place = registration_place(name, DEFINITION)
    if place is not None:
        return f"{place.file}:{place.line}"
    code = getattr(registries.published_function(str(name)), "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    return operators.registration_site(name.packet, name.overload)


def defining_module(name: OpName) -> str | None:
    """Return the module that called `torchop.define` for an operator, or None if there is none."""
    place = registration_place(name, DEFINITION)
    return None if place is None else place.module


def _in_library(name: OpName, library: torch.library.Library) -> Definition:
    schema = find_schema(name)
    # Store the definitions in the library object, so that they live as long as the library.
    definitions: dict[str, Definition] = library.__dict__.setdefault(DEFINITIONS, {})
    definition = definitions.get(str(name))
    if definition is None or definition.schema.text != schema.text:
        registered, helpers = registrations_of(library, name), NOTHING
        if definition is not None:
            helpers = definition.helpers
            registered.remove_all()  # these rules were registered for another schema
        definition = definitions[str(name)] = Definition(
            Declaration(name, schema), library, registered=registered
        )
        definition.helpers = helpers  # the names of these helper operators are still taken
    return definition


# An operator that can be redefined: either its definition by torchop's `custom_op`, or the library
# in which PyTorch's `custom_op` defined it.
Replaceable: TypeAlias = "Definition | torch.library.Library"


def replace(name: OpName, site: Site, define: Callable[[], Definition]) -> Definition:
    """Call `define` under the registration lock, once no operator has this name.

    If `custom_op` created an operator with this name, deregister it first, and warn if the new
    operator has a different function. If any other operator has the name, raise RuntimeError.
    """
    announced, reason = None, ""
    while True:
        with then_run_hooks():
            existing = find_replaceable(name, site)
            if existing is None:  # as for almost all definitions
                return define()
            torch_ops.refuse_running([name])
            if existing is announced:
                with torch_ops.preserve_packet(name.namespace, name.name):
                    if isinstance(existing, Definition):
                        existing.deregister(reason)
                    else:
                        torch_ops.invalidate({name: reason})
                        libraries.deregister(existing, name)
                    return define()
        # Emit the warning after releasing the lock, because a warning may run user code. If another
        # thread replaces the operator in the meantime, the next iteration warns about that thread's
        # operator too.
        announced, reason = existing, _announce(existing, name, site)


def find_replaceable(name: OpName, site: Site) -> Replaceable | None:
    """Return the operator with this name, or None. Raise if the operator cannot be replaced."""
    with registration_lock:  # another thread defines the schema before it publishes the handle
        definition = own_definition(None, name)
        if definition is None:
            library = registries.published_library(str(name))
            if library is not None and library.m is not None:
                return library
        elif definition.deregistration_reason is None:
            return definition
        # `has_entry` comes first, because `is_registered` is slow: it makes TorchScript index all
        # new operators.
        is_taken = operators.has_entry(*name) and operators.is_registered(
            name.packet, name.overload
        )
    if is_taken:
        raise already_defined(name, site, "; load a package that carries it after this definition")
    return None


def already_defined(name: OpName, site: object, advice: str = "") -> RuntimeError:
    return RuntimeError(
        f"{name} cannot be defined at {site}: it exists already, registered at "
        f"{registration_site(name)}. Rename one of them{advice}."
    )


def _announce(existing: Replaceable, name: OpName, site: Site) -> str:
    """Warn about a redefinition, and return the message of the error that the old handle raises.

    Do not warn if the same function is defined again, as in a notebook.
    """
    if not isinstance(existing, Definition):
        _warn(name, "with torch.library.custom_op", str(site), "Rename one of them.")
        return f"{name} was replaced by the definition at {site}; use that one."
    before = existing.declaration.site
    assert before is not None  # it is None only for operators of other packages
    earlier, later = _distinct_places(before, site)
    if before.origin != site.origin:
        advice = "Rename one of them."
        if before.file == site.file:
            advice = "Import the file under one name, or give its operators their own namespace."
        _warn(name, f"at {earlier}", later, advice)
    return (
        f"This is a handle of the {name} that was defined at {earlier}. It was replaced by the "
        f"definition at {later}; use that one."
    )


def _warn(name: OpName, before: str, after: str, advice: str) -> None:
    warn(
        f"{name} was defined {before} and is defined again at {after}, which replaces it. {advice}",
        RedefinitionWarning,
    )


def _distinct_places(before: Site, site: Site) -> tuple[str, str]:
    """Return both locations as text, and add the module names if the locations are equal.

    The locations are equal if the same file was imported under two module names. Then the module
    names are the only difference between the two definitions.
    """
    if str(before) != str(site) or before.module == site.module:
        return str(before), str(site)
    return f"{before} in the module {before.module}", f"{site} in the module {site.module}"
