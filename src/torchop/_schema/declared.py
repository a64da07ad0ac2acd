"""The schema of an operator about to be defined: inferred or parsed, and checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torchop._compat import schemas
from torchop._compat.classes import Tag
from torchop._errors import SchemaError, short_repr, short_text
from torchop._schema import compare
from torchop._schema.convention import FLAT, Convention
from torchop._schema.forms import Form, check_form, form_of, form_of_schema
from torchop._schema.infer import UNKNOWN, infer_schema, mutated_names
from torchop._schema.naming import OpName
from torchop._schema.optional_out import check_maybe_out
from torchop._schema.schema import Schema

Tags = Tag | Iterable[Tag] | None
# The dispatcher has a bit for each, and refuses more only later, when the name was already freed.
MAX_ARGUMENTS = 64
# Operators of torchop keep the contract that torch.compile relies on.
_CONTRACT = (Tag.pt2_compliant_tag,)


def declared_schema(
    name: OpName,
    function: Callable[..., Any],
    schema: str | None,
    mutates_args: str | Iterable[str],
    tags: tuple[Tag, ...],
) -> tuple[Schema, Callable[..., Any], Convention]:
    """The schema, the function that takes its arguments, and how the author's are called."""
    refusal = None
    if schema is None:
        names = mutated_names(str(name), mutates_args)  # once, because it may be an iterator
        mutates_args = UNKNOWN if names is None else names
    try:
        parsed = make_schema(name, function, mutates_args, tags, schema)
    except SchemaError as error:
        if schema is not None:
            raise
        refusal = error
    # Nobody checks an object of a class that is registered as opaque in a schema, and an Enum that
    # was such an object is lost in a file. The name of such a class has a point. Most schemas have
    # none, and are not printed for this.
    takes_objects = refusal is None and "." in parsed.written and "PyObject" in parsed.text
    if refusal is None and (schema is not None or not takes_objects):
        return parsed, function, FLAT
    from torchop._schema.structure import convention, derive  # which few operators need

    structure = derive.derive_structure(str(name), function, mutates_args, tags)
    if structure is None:
        if refusal is not None:
            raise refusal
        return parsed, function, FLAT
    kernel, text = structure.flat_function, structure.schema_text
    parsed = make_schema(name, kernel, structure.mutated, tags, text)
    return parsed, kernel, convention.StructuredConvention(structure)


def make_schema(
    name: OpName,
    function: Callable[..., Any],
    mutates_args: str | Iterable[str],
    tags: tuple[Tag, ...],
    schema: str | None = None,
) -> Schema:
    """Infers the schema or parses the given one, and checks what PyTorch would notice too late."""
    if schema is None:
        text = infer_schema(function, mutates_args=mutates_args, tags=tags)
    else:
        text = schema.strip() if isinstance(schema, str) else ""
        if not text.startswith("("):
            raise SchemaError(
                f'{name}: schema looks like "(Tensor x) -> Tensor", without the name of the '
                f"operator; got {short_repr(schema)}."
            )
    try:
        parsed = schemas.parse(f"{name}{text}")
    except (RuntimeError, IndexError, TypeError, UnicodeError) as error:
        raise SchemaError(
            f"{name}: the schema {short_repr(text)} does not parse: {short_text(error)}"
        ) from None
    # Most schemas need no look at their arguments.
    if text.count(",") >= MAX_ARGUMENTS and len(parsed.arguments) > MAX_ARGUMENTS:
        raise SchemaError(
            f"{name}: the schema has {len(parsed.arguments)} arguments, but PyTorch takes at most "
            f"{MAX_ARGUMENTS}. Each field of a structure is an argument, so put values of one type "
            "into a list or a dict."
        )
    form = form_of(tags)
    check_form(name, form, parsed)
    if form is Form.PLAIN and schema is not None:
        form = form_of_schema(parsed)
    result = Schema(parsed, f"{name.local}{text}", form)
    check_maybe_out(name, parsed)
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


def checked_tags(name: OpName, tags: Tags) -> tuple[Tag, ...]:
    if tags is None:
        return _CONTRACT
    members = tuple(tags) if isinstance(tags, Iterable) else (tags,)
    for tag in members:
        if not isinstance(tag, Tag):
            raise TypeError(f"{name}: tags expects torch.Tag members, got {short_repr(tag)}.")
    return tuple(dict.fromkeys((*_CONTRACT, *members)))
