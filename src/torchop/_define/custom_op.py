"""custom_op: from a function to an operator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import torch.library

from torchop._core.define import check_home, define_operator
from torchop._core.definition import Definition
from torchop._core.registry import place_of
from torchop._define.handle import CustomOp
from torchop._errors import MissingEffectWarning, warn
from torchop._rules.effect import Declared, Effect, check_effect, check_not_traced
from torchop._rules.kernels.rule import DeviceTypes, device_key, device_list
from torchop._schema import naming
from torchop._schema.callables import check_callable
from torchop._schema.convention import FLAT, Convention
from torchop._schema.declared import Tags, checked_tags, declared_schema
from torchop._schema.forms import form_tags
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

if TYPE_CHECKING:
    from torchop._rules.inlining import Compile

P = ParamSpec("P")
R = TypeVar("R")


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

    op_name = naming.check_new(name)
    check_home(op_name, lib)

    def define(function: Callable[P, R]) -> CustomOp[P, R]:
        check_callable(f"custom_op({name!r})", function)
        devices = device_list(device_types)
        for device in devices:
            if device is not None:
                device_key(op_name, device)
        all_tags = checked_tags(op_name, tags)
        parsed, structure = declared_schema(op_name, function, schema, mutates_args, all_tags)
        declared = check_effect(op_name, effects, parsed, "effects")
        if structure is not None and structure.values.places and not parsed.returns:
            declared = declared or "none"  # what it returns is known without the call
        if declared is None:
            _warn_of_missing_effect(op_name, parsed)
        else:
            check_not_traced(op_name, declared)
        inlined = None if compile == "opaque" else _inlined(op_name, compile, declared)
        handle: CustomOp[P, R] = define_operator(
            op_name,
            parsed,
            function if structure is None else structure.flat_function,
            devices=devices,
            # One that says its form in the schema alone is known to compilers by the tag.
            tags=tuple(dict.fromkeys((*all_tags, *form_tags(parsed.form)))),
            lib=lib,
            place=place_of(function, *place),
            schema_is_inferred=schema is None,
            effect=declared,
            convention=FLAT if structure is None else _convention_of(structure),
        )
        if inlined is not None:
            inlined(handle._definition)
        return handle

    return define if fn is None else define(fn)


def _convention_of(structure: Any) -> Convention:
    from torchop._schema.structure.convention import (
        StructuredConvention,  # which few operators need
    )

    return StructuredConvention(structure)


def _inlined(
    name: OpName, choice: Compile, declared: Declared
) -> Callable[[Definition], None] | None:
    from torchop._rules import inlining  # which most programs do not need

    inlined = inlining.check_compile(name, choice, declared)
    return None if inlined is None else partial(inlining.install, inlined=inlined)


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
