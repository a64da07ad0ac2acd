"""infer_schema: the schema that a function's annotations describe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torchop._compat import schemas
from torchop._compat.classes import Tag
from torchop._errors import SchemaError, short_repr, short_text
from torchop._schema import defaults, signatures, types
from torchop._schema.forms import Form, check_form, form_of, infer_return
from torchop._schema.text import numbered_alias, with_write, write

UNKNOWN = "unknown"


def infer_schema(
    prototype_function: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str],
    op_name: str | None = None,
    tags: Tag | Iterable[Tag] | None = (),
) -> str:
    """Returns the schema that a function's annotations describe.

    Args:
        prototype_function: a function whose parameters and result are annotated. Annotations may be
            strings.
        mutates_args: the names of the tensor arguments that the function writes into, or
            `"unknown"` for all of them.
        op_name: a name to put before the schema.
        tags: the tags of the operator. `torch.Tag.inplace` and `torch.Tag.out` make its results
            aliases of what it mutates.

    Returns:
        The schema, such as `"(Tensor pic, SymInt[] box) -> Tensor"`.

    Raises:
        SchemaError: a `ValueError` that names the parameter, what was found and the nearest type
            that a schema can express.

    Example:
        >>> import torch, torchop
        >>> def crop(pic: torch.Tensor, box: list[int], scale: float = 1.0) -> torch.Tensor: ...
        >>> torchop.infer_schema(crop, mutates_args=())
        '(Tensor pic, SymInt[] box, float scale=1.0) -> Tensor'

    The idea is `torch.library.infer_schema`.
    """
    signature = signatures.readable_signature(prototype_function)
    where = signatures.spell_function(prototype_function)
    mutated = mutated_names(where, mutates_args)
    form = form_of((tags,) if isinstance(tags, Tag) else tags or ())
    if mutated:
        _check_mutated(where, mutated, signature)
    parameters: list[str] = []
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parameters:
            parameters.append("*")
        parameters.append(_argument(where, index, parameter, mutated, prototype_function))
    returns = infer_return(form, where, signature, mutated) or _returns(where, signature)
    text = write(parameters, returns)
    if form is not Form.PLAIN:
        check_form(where, form, schemas.parse(f"f{text}"))
    return f"{op_name or ''}{text}"


def mutated_names(where: str, mutates_args: str | Iterable[str]) -> tuple[str, ...] | None:
    """The names in `mutates_args`; None means `"unknown"`, every tensor argument."""
    if isinstance(mutates_args, str):
        if mutates_args == UNKNOWN:
            return None
        fix = (
            f"for one argument write mutates_args=({short_repr(mutates_args)},)"
            if mutates_args.isidentifier()
            else "for a function that mutates nothing write mutates_args=()"
        )
        raise SchemaError(
            f"{where}: mutates_args={short_repr(mutates_args)}: expected a sequence of argument "
            f"names, or the string 'unknown'; {fix}."
        )
    try:
        names = tuple(mutates_args)
    except TypeError:
        raise TypeError(
            f"{where}: mutates_args={short_repr(mutates_args)}: expected a sequence of argument "
            "names, or the string 'unknown'; for a function that mutates nothing write "
            "mutates_args=()."
        ) from None
    for name in names:
        if not isinstance(name, str):
            raise SchemaError(
                f"{where}: mutates_args holds {short_repr(name)}; expected the names of arguments, "
                "as strings."
            )
    return names


def _argument(
    where: str,
    index: int,
    parameter: inspect.Parameter,
    mutated: tuple[str, ...] | None,
    function: Callable[..., Any],
) -> str:
    name = parameter.name
    if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
        method = signatures.method_hint(function)
        bare = parameter.replace(annotation=parameter.empty, default=parameter.empty)
        raise SchemaError(
            f"{where}: parameter {_spell(str(bare))} is {parameter.kind.description}, which a "
            "schema cannot express (no positional-only args, varargs (*args) or varkwargs "
            "(**kwargs))"
            f"{f'.{method}' if method else f'; {_INSTEAD[parameter.kind]}.'}"
        )
    if not name.isascii() or not schemas.is_identifier(name):
        raise SchemaError(
            f"{where}: parameter {_spell(name)} has a name that a schema cannot hold; use one of "
            "ASCII letters, digits and underscores that is not a keyword of TorchScript."
        )
    annotation = parameter.annotation
    if annotation is parameter.empty:
        method = signatures.method_hint(function) if index == 0 else ""
        if (index, name) == (0, "ctx"):
            method = (
                " A forward takes no 'ctx': save in setup_context(ctx, inputs, output) instead."
            )
        raise SchemaError(
            f"{where}: parameter {_spell(name)} must have a type annotation"
            f"{f'.{method}' if method else f'; supported are {types.SUPPORTED}.'}"
        )
    schema_type = types.parameter_type(parameter)
    if schema_type is None:
        raise SchemaError(
            f"{where}: parameter {_spell(name)} has unsupported type {types.spell(annotation)}; "
            f"{types.instead(annotation, types.nearest(annotation))}."
        )
    if schema_type.startswith("Tensor") and (mutated is None or name in mutated):
        schema_type = with_write(schema_type, numbered_alias(index))
    if parameter.default is inspect.Parameter.empty:
        return f"{schema_type} {name}"
    try:
        return f"{schema_type} {name}={defaults.render(parameter.default, schema_type)}"
    except SchemaError as error:
        raise SchemaError(
            f"{where}: parameter {_spell(name)} ({types.spell(annotation)}) has the unsupported "
            f"default {_spell(parameter.default)}: {error}."
        ) from None


# What to write in place of a parameter that a schema has no kind for.
_INSTEAD = {
    inspect.Parameter.POSITIONAL_ONLY: "write it without the '/'",
    inspect.Parameter.VAR_POSITIONAL: "give it a name and a type, such as list[Tensor]",
    inspect.Parameter.VAR_KEYWORD: "write each keyword behind a '*', with a type and a default, "
    "such as *, scale: float = 1.0",
}


def _spell(value: Any) -> str:
    return signatures.shorten(repr(value))


def _check_mutated(where: str, mutated: tuple[str, ...], signature: inspect.Signature) -> None:
    candidates = [
        name
        for name, parameter in signature.parameters.items()
        if (types.argument_type(parameter.annotation) or "").startswith("Tensor")
    ]
    others = [name for name in mutated if name not in candidates]
    if not others:
        return
    choices = f"the tensor arguments are {', '.join(candidates) or 'none'}."
    unknown = [name for name in others if name not in signature.parameters]
    if unknown:
        raise SchemaError(
            f"{where}: {spell_names(unknown)} in mutates_args were not found in the signature; "
            f"{choices}"
        )
    annotation = signature.parameters[others[0]].annotation
    if types.argument_type(annotation) is not None:  # else that is what there is to say
        raise SchemaError(
            f"{where}: mutates_args names {short_repr(others[0])} of type "
            f"{types.spell(annotation)}; only "
            f"tensors and lists of tensors can be mutated, and {choices}"
        )


def spell_names(names: Iterable[str]) -> str:
    """Names as the set they form, in an order that does not change from run to run."""
    return short_text(f"{{{', '.join(sorted({repr(name) for name in names}))}}}")


def _returns(where: str, signature: inspect.Signature) -> str:
    annotation = signature.return_annotation
    if annotation is inspect.Signature.empty:
        raise SchemaError(
            f"{where}: No return type annotation was provided. Please add one, such as -> Tensor, "
            "or -> None for a function that returns nothing."
        )
    text = types.return_type(annotation)
    if text is None:
        raise SchemaError(
            f"{where}: return has unsupported type {types.spell(annotation)}; supported are "
            f"{types.RETURNABLE}."
        )
    return text
