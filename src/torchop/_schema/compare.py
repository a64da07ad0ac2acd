"""A hand-written schema against the function it describes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torchop._compat import schemas
from torchop._errors import SchemaError, SchemaWarning, short_repr, short_text, warn
from torchop._schema import infer, signatures, types
from torchop._schema.defaults import same_default
from torchop._schema.schema import Argument, Schema


def check_mutation(name: str, schema: Schema, mutates_args: str | Iterable[str]) -> None:
    """Refuses a schema that mutates other arguments than `mutates_args` names."""
    tensors = {a.name for a in schema.arguments if a.holds_tensors}
    mutated = infer.mutated_names(mutates_args)
    names = tensors if mutated is None else set(mutated)
    if names != set(schema.mutated):
        raise SchemaError(
            f"{name}: mutates_args={short_repr(mutates_args)} and "
            f"schema={short_repr(schema.text)} disagree: by the "
            f"schema the op mutates {infer.spell_names(schema.mutated)}. Make them say the same."
        )


def check_function(name: str, schema: Schema, function: Callable[..., Any]) -> None:
    """Compares a schema with the signature of the function that implements it.

    Parameters without annotation are compared in number only. `int` stands for both `int` and
    `SymInt`. Another number or type is an error; another name or default, a warning.
    """
    try:
        signature = signatures.signature(function)
    except SchemaError:
        return  # nothing to compare with: a builtin, or annotations that only a checker reads
    parameters = list(signature.parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return
    texts = (
        f"schema {short_text(schema.text)}, function "
        f"{signatures.spell_function(function)}{short_text(signature)}"
    )
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    keyword_only = {p.name: p for p in parameters if p.kind is p.KEYWORD_ONLY}
    if len(positional) != len(schema.positional) or len(keyword_only) != len(schema.keyword_only):
        raise SchemaError(
            f"{name}: the schema takes {_count(len(schema.positional), len(schema.keyword_only))}, "
            f"the function {_count(len(positional), len(keyword_only))}: {texts}."
            f"{signatures.method_hint(function)}"
        )
    pairs = list(zip(schema.positional, positional, strict=True))
    for argument in schema.keyword_only:
        if argument.name not in keyword_only:
            raise SchemaError(
                f"{name}: the function has no keyword-only parameter {argument.name!r}: {texts}."
            )
        pairs.append((argument, keyword_only[argument.name]))
    for argument, parameter in pairs:
        _check_type(name, argument, parameter, texts)
        _warn_about_name_and_default(name, argument, parameter)
    _check_returns(name, schema, signature, texts)


def _count(positional: int, keyword_only: int) -> str:
    return f"{positional} positional and {keyword_only} keyword-only parameters"


def _check_type(name: str, argument: Argument, parameter: inspect.Parameter, texts: str) -> None:
    if parameter.annotation is inspect.Parameter.empty:
        return
    schema_type = types.parameter_type(parameter)
    if schema_type is None:
        return  # the reason to write a schema by hand may be a type that annotations cannot infer
    kind = str(schemas.parse(f"f({schema_type} x) -> ()").arguments[0].real_type)
    if kind != argument.kind:
        raise SchemaError(
            f"{name}: the schema says {argument.name!r} is {argument.kind}, the annotation "
            f"{types.spell(parameter.annotation)} says {kind}: {texts}."
        )


def _check_returns(name: str, schema: Schema, signature: inspect.Signature, texts: str) -> None:
    if signature.return_annotation is inspect.Signature.empty:
        return
    schema_type = types.return_type(signature.return_annotation)
    if schema_type is None:
        return
    returns = tuple(str(r.real_type) for r in schemas.parse(f"f() -> {schema_type}").returns)
    if returns != schema.returns:
        raise SchemaError(
            f"{name}: the schema returns {_results(schema.returns)}, the annotation "
            f"{types.spell(signature.return_annotation)} says {_results(returns)}: {texts}."
        )


def _results(returns: tuple[str, ...]) -> str:
    return f"({', '.join(returns)})" if returns else "nothing"


def _warn_about_name_and_default(
    name: str, argument: Argument, parameter: inspect.Parameter
) -> None:
    if argument.name != parameter.name and parameter.kind is not parameter.POSITIONAL_ONLY:
        warn(
            f"{name}: the schema calls a parameter {argument.name!r}, the function "
            f"{parameter.name!r}; callers must use the schema's name.",
            SchemaWarning,
        )
    has_own = parameter.default is not inspect.Parameter.empty
    if has_own and not (argument.has_default and same_default(parameter.default, argument)):
        declared = short_repr(argument.default) if argument.has_default else "none"
        warn(
            f"{name}: parameter {argument.name!r} has the default {short_repr(parameter.default)} "
            f"in the function and {declared} in the schema; the schema's is used.",
            SchemaWarning,
        )
