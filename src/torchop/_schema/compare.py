from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from torchop._compat import schemas
from torchop._errors import SchemaError, SchemaWarning, mistake, short_repr, short_text, warn
from torchop._schema import kinds, signatures, types
from torchop._schema.defaults import same_default
from torchop._schema.mutates_args import mutated_names, spell_names
from torchop._schema.schema import Argument, Schema


def check_mutation(schema: Schema, mutates_args: str | Iterable[str]) -> None:
    tensors = {a.name for a in schema.arguments if a.holds_tensors}
    mutated = mutated_names(mutates_args)
    names = tensors if mutated is None else set(mutated) - schema.objects
    if names != set(schema.mutated):
        raise mistake(
            f"mutates_args={short_repr(mutates_args)} and schema={short_repr(schema.text)} "
            "disagree: according to the schema, the op mutates "
            f"{spell_names(schema.mutated)}. Change one of them."
        )


def check_function(schema: Schema, function: Callable[..., Any]) -> None:
    """Check a hand-written schema against the function's signature.

    Raise SchemaError if the function lacks a parameter, has an extra parameter without a default,
    or annotates a parameter with a type that does not fit the schema. If only names, defaults,
    number types or `Optional` differ, warn instead, because calls follow the schema and ignore
    these parts of the signature. Parameters without an annotation are not compared.
    """
    try:
        signature = signatures.signature(function)
    except SchemaError:
        return  # the function is a builtin, or its annotations cannot be evaluated
    parameters = list(signature.parameters.values())
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return
    name = schema.name
    texts = (
        f"schema {short_text(schema.text)}, function "
        f"{signatures.spell_function(function)}{short_text(signature)}"
    )
    positional = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    pairs = list(zip(schema.positional, positional, strict=False))
    rest = {p.name: p for p in parameters[len(pairs) :]}  # keyword-only or additional parameters
    missing = [a for a in schema.keyword_only if not _by_name(rest.get(a.name))]
    pairs += [(a, rest.pop(a.name)) for a in schema.keyword_only if a not in missing]
    required = [p for p in rest.values() if p.default is p.empty]
    if len(positional) < len(schema.positional) or (required and not missing):
        keyword_only = len(parameters) - len(positional)
        raise SchemaError(
            f"{name}: the schema takes {_count(len(schema.positional), len(schema.keyword_only))}, "
            f"the function {_count(len(positional), keyword_only)}: {texts}. The function needs a "
            "parameter for each argument of the schema, and a default for every other parameter."
            f"{signatures.method_hint(function)}"
        )
    if missing:
        raise SchemaError(
            f"{name}: the function has no parameter {missing[0].name!r} that can be passed by "
            f"keyword only: {texts}."
        )
    for argument, parameter in pairs:
        _check_type(name, argument, parameter, texts)
        _warn_about_name_and_default(name, argument, parameter)
    _check_returns(name, schema, signature, texts)


def _by_name(parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY


def _count(positional: int, keyword_only: int) -> str:
    return f"{positional} positional and {keyword_only} keyword-only parameters"


def _check_type(name: str, argument: Argument, parameter: inspect.Parameter, texts: str) -> None:
    if parameter.annotation is inspect.Parameter.empty:
        return
    schema_type = kinds.parameter_type(parameter)
    if schema_type is None:
        return  # we can't infer this type, which may be why the author wrote the schema by hand
    kind = str(schemas.parse(f"f({schema_type} x) -> ()").arguments[0].real_type)
    if kind == argument.kind:
        return
    text = (
        f"{name}: the schema says {argument.name!r} is {argument.kind}, the annotation "
        f"{types.spell(parameter.annotation)} says {kind}: {texts}."
    )
    if _loosely(kind) != _loosely(argument.kind):
        raise SchemaError(text)
    warn(text, SchemaWarning)


def _loosely(kind: str) -> list[str]:
    """Split a type into words, so that `Optional` and the kind of number can be ignored."""
    words = re.findall(r"\w+", kind)
    return ["number" if w in ("int", "float", "bool") else w for w in words if w != "Optional"]


def _check_returns(name: str, schema: Schema, signature: inspect.Signature, texts: str) -> None:
    if signature.return_annotation is inspect.Signature.empty:
        return
    schema_type = kinds.return_type(signature.return_annotation)
    if schema_type is None:
        return
    returns = tuple(str(r.real_type) for r in schemas.parse(f"f() -> {schema_type}").returns)
    # The annotation `list[Tensor]` is also fine if the schema returns several Tensors.
    lists = [(f"List[{kind}]",) for kind in set(schema.returns)]
    if returns == schema.returns or [returns] == lists:
        return
    text = (
        f"{name}: the schema returns {_results(schema.returns)}, the annotation "
        f"{types.spell(signature.return_annotation)} says {_results(returns)}: {texts}."
    )
    if [*map(_loosely, returns)] != [*map(_loosely, schema.returns)]:
        raise SchemaError(text)
    warn(text, SchemaWarning)


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
