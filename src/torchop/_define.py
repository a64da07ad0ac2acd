"""custom_op: from a function to an operator."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch.library

from torchop import _naming
from torchop._compat import handles, libraries, operators, retirement, schemas, torch_ops
from torchop._compat.classes import Tag
from torchop._definition import Definition, Guard, Place
from torchop._errors import (
    MissingEffectWarning,
    OperatorGoneError,
    RedefinitionWarning,
    SchemaError,
)
from torchop._library import Library
from torchop._naming import OpName
from torchop._native import switch
from torchop._operator import CustomOp
from torchop._plan import registration_lock
from torchop._resolve import own_definition
from torchop._rules._callables import check_callable
from torchop._rules.effect import (
    Declared,
    Effect,
    EffectRule,
    check_effect,
    check_not_traced,
)
from torchop._rules.kernels import DeviceTypes, KernelRule, device_key, device_list
from torchop._schema import compare
from torchop._schema.forms import Form, check_form, form_of, form_of_schema, form_tags
from torchop._schema.infer import infer_schema
from torchop._schema.maybe_out import check_maybe_out
from torchop._schema.schema import Schema
from torchop._warn import warn

if TYPE_CHECKING:
    from torchop._rules.inlining import Compile
    from torchop._structure.structure import Structure

P = ParamSpec("P")
R = TypeVar("R")
Tags = Tag | Iterable[Tag] | None
# The dispatcher has a bit for each, and says no only when it is told of the operator.
MAX_ARGUMENTS = 64


@overload
def custom_op(
    name: str,
    fn: None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    effects: Effect = None,
    compile: Compile = "opaque",
    lib: torch.library.Library | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]]: ...


@overload
def custom_op(
    name: str,
    fn: Callable[P, R],
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    effects: Effect = None,
    compile: Compile = "opaque",
    lib: torch.library.Library | None = None,
) -> CustomOp[P, R]: ...


def custom_op(
    name: str,
    fn: Callable[P, R] | None = None,
    /,
    *,
    mutates_args: str | Iterable[str],
    device_types: DeviceTypes = None,
    schema: str | None = None,
    tags: Tags = None,
    effects: Effect = None,
    compile: Compile = "opaque",
    lib: torch.library.Library | None = None,
) -> Callable[[Callable[P, R]], CustomOp[P, R]] | CustomOp[P, R]:
    """Makes an operator of a function, as a decorator or as a call.

    Args:
        name: `"namespace::name"` or `"namespace::name.overload"`; the namespace is usually the name
            of your package.
        fn: the function. Its annotations give the schema, and it is the kernel. They may say more
            than a schema can: of a dataclass, an Enum, a tuple and the like, arguments are made
            that it can hold, and the function gets such objects.
        mutates_args: the names of the tensor arguments that the function writes into, or
            `"unknown"` for all of them; `()` for a function that writes into none.
        device_types: for which device types the function is the kernel; None for all.
        schema: a schema such as `"(Tensor x, int n=1) -> Tensor"`, instead of the annotations. It
            is compared with the annotations that there are.
        tags: a `torch.Tag`, or several.
        effects: `"ordered"`, or `EffectType.ORDERED`, if the function does something that the
            schema does not show, such as logging: compilers then keep every call, and their order.
            `"none"` if it returns nothing and has no effect, so that its calls may disappear. None
            says neither.
        compile: `"inline"` if compilers may trace the function, and optimize what it consists of;
            a mapping such as `{"inductor": "inline"}` says it by backend. The function is the fake
            kernel too, then, until another one is registered. Exported programs hold the operator
            all the same, and gradients follow the registered formula.
        lib: the library that the operator lives in; by default it lives as long as the process.

    Returns:
        The handle, which is called and treated like the function.

    Raises:
        EffectError: the operator was compiled already, with another effect.
        ValueError: a name, an annotation, a schema, `mutates_args`, `effects` or `compile` that
            breaks a rule. Nothing stays defined.
        NotImplementedError: a tensor that can be passed by keyword only.
        RuntimeError: the operator exists already, defined by other means than `custom_op`.

    Warns:
        MissingEffectWarning: the function returns nothing and mutates nothing, and `effects` does
            not say why it is called. `torch.compile` will refuse it.
        RedefinitionWarning: the operator was defined before by another function. The new
            definition replaces it; the same function, in a reloaded module or a notebook cell,
            replaces its own quietly.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::scale", mutates_args=())
        ... def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        ...     return x * factor
        >>> scale(torch.ones(2), factor=3.0)
        tensor([3., 3.])
        >>> torch.ops.docs.scale(torch.ones(2))
        tensor([2., 2.])

    The idea is `torch.library.custom_op`.
    """
    caller = sys._getframe(1)
    place = caller.f_globals.get("__name__", "__main__"), caller.f_code.co_filename, caller.f_lineno

    op_name = _naming.check_new(name)
    check_home(op_name, lib)

    def define(function: Callable[P, R]) -> CustomOp[P, R]:
        check_callable(f"custom_op({name!r})", function)
        devices = device_list(device_types)
        for device in devices:
            if device is not None:
                device_key(op_name, device)
        all_tags = checked_tags(op_name, tags)
        parsed, structure = _make_schema(op_name, function, schema, mutates_args, all_tags)
        declared = check_effect(op_name, effects, parsed, "effects")
        if structure is not None and structure.value_places and not parsed.returns:
            declared = declared or "none"  # what it returns is known without the call
        if declared is None:
            _warn_of_missing_effect(op_name, parsed)
        else:
            check_not_traced(op_name, declared)
        inlined = None if compile == "opaque" else _inlined(op_name, compile, declared)
        handle: CustomOp[P, R] = define_operator(
            op_name,
            parsed,
            function if structure is None else structure.kernel(function),
            devices=devices,
            # One that says its form in the schema alone is known to compilers by the tag.
            tags=tuple(dict.fromkeys((*all_tags, *form_tags(parsed.form)))),
            lib=lib,
            place=place_of(function, *place),
            schema_is_inferred=schema is None,
            declared=declared,
            structure=structure,
        )
        if inlined is not None:
            inlined(handle._definition)
        return handle

    return define if fn is None else define(fn)


def _inlined(
    name: OpName, choice: Compile, declared: Declared
) -> Callable[[Definition], None] | None:
    from torchop._rules import inlining  # which most programs do not need

    inlined = inlining.check_compile(name, choice, declared)
    return None if inlined is None else partial(inlining.install, inlined=inlined)


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
        _replace(name, place)
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


def _make_schema(
    name: OpName,
    function: Callable[..., Any],
    schema: str | None,
    mutates_args: str | Iterable[str],
    tags: tuple[Tag, ...],
) -> tuple[Schema, Structure | None]:
    """The schema, and the structure of a function whose annotations say more than it can."""
    refused = None
    try:
        parsed = make_schema(name, function, schema, mutates_args, tags)
    except SchemaError as error:
        if schema is not None:
            raise
        refused = error
    # An object in a schema is not checked by anybody, and an Enum in an exported file is lost.
    if refused is None and (schema is not None or "PyObject" not in parsed.text):
        return parsed, None
    from torchop._structure.derive import derive_structure  # which few operators need

    structure = derive_structure(str(name), function, mutates_args, tags)
    if structure is None:
        if refused is not None:
            raise refused
        return parsed, None
    flat = structure.kernel(function)
    return make_schema(name, flat, structure.schema_text, structure.mutated, tags), structure


def make_schema(
    name: OpName,
    function: Callable[..., Any],
    schema: str | None,
    mutates_args: str | Iterable[str],
    tags: tuple[Tag, ...],
) -> Schema:
    """Infers or parses the schema, and checks what PyTorch would only notice later."""
    if schema is None:
        text = infer_schema(function, mutates_args=mutates_args, tags=tags)
    else:
        text = schema.strip() if isinstance(schema, str) else ""
        if not text.startswith("("):
            raise SchemaError(
                f'{name}: schema looks like "(Tensor x) -> Tensor", without the name of the '
                f"operator; got {schema!r}."
            )
    try:
        parsed = schemas.parse(f"{name}{text}")
    except (RuntimeError, IndexError, TypeError, UnicodeError) as error:
        raise SchemaError(f"{name}: the schema {text!r} does not parse: {error}") from None
    if text.count(",") >= MAX_ARGUMENTS:  # most schemas need no look at their arguments
        _check_length(name, parsed)
    form = form_of(tags)
    check_form(name, form, parsed)
    if form is Form.PLAIN and schema is not None:
        form = form_of_schema(parsed)
    result = Schema(parsed, f"{name.local}{text}", form)
    check_maybe_out(name, parsed, function)
    if schema is not None:
        compare.check_mutation(str(name), result, mutates_args)
        compare.check_function(str(name), result, function)
    tensors = result.keyword_only_tensors
    if tensors and form is not Form.OUT:
        raise NotImplementedError(
            f"{name}: custom_op with kwarg-only Tensor args ({', '.join(tensors)}): they could "
            f"have no gradient. Move them before the '*'. Got {parsed}."
        )
    return result


def _check_length(name: OpName, parsed: Any) -> None:
    """Refuses a schema that the dispatcher would, when what had the name before is gone."""
    count = len(parsed.arguments)
    if count > MAX_ARGUMENTS:
        raise SchemaError(
            f"{name}: the schema has {count} arguments, of which PyTorch takes at most "
            f"{MAX_ARGUMENTS}; a structure has one for each field. Put values of one type into a "
            "list or a dict."
        )


def _warn_of_missing_effect(name: OpName, schema: Schema) -> None:
    if schema.returns or schema.is_mutable:
        return
    warn(
        f"{name} returns nothing and mutates nothing, so a compiler would remove its calls, and "
        'torch.compile refuses it. If it does something else, such as logging, pass effects="'
        'ordered" to custom_op; if it writes into an argument, name that in mutates_args; if '
        'nothing is lost without it, pass effects="none".',
        MissingEffectWarning,
    )


def checked_tags(name: OpName, tags: Tags) -> tuple[Tag, ...]:
    if not isinstance(tags, (Tag, Iterable, type(None))):
        raise TypeError(f"{name}: tags expects torch.Tag members, got {tags!r}.")
    given = (tags,) if isinstance(tags, Tag) else tuple(tags or ())
    for tag in given:
        if not isinstance(tag, Tag):
            raise ValueError(f"{name}: tags expects torch.Tag members, got {tag!r}.")
    # What torchop defines keeps the contract that torch.compile relies on.
    return tuple(dict.fromkeys((Tag.pt2_compliant_tag, *given)))


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


def place_of(function: Callable[..., Any], module: str, file: str, line: int) -> Place:
    code = getattr(function, "__code__", None)
    if code is not None:
        file, line = code.co_filename, code.co_firstlineno
    qualname = getattr(function, "__qualname__", None)
    if qualname is None:
        # A partial or a callable object: its module is that of its class, and says nothing of it.
        return Place(module, f"line {line}", file, line)
    return Place(getattr(function, "__module__", None) or module, qualname, file, line)


def _replace(name: OpName, place: Place) -> None:
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
        raise RuntimeError(
            f"{name} cannot be defined at {place}: it exists already, "
            f"{operators.registration_site(name)}. Give one of them another name."
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
