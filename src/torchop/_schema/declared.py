"""Infer or parse a new operator's schema, and check it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torchop._compat import schemas
from torchop._compat.classes import Tag
from torchop._errors import mistake, short_repr, short_text
from torchop._schema import compare
from torchop._schema.convention import FLAT, Convention
from torchop._schema.forms import Form, check_form, form_of, form_of_schema
from torchop._schema.naming import OpName
from torchop._schema.optional_out import check_maybe_out
from torchop._schema.schema import MAX_ARGUMENTS, Schema
from torchop._schema.tree import FunctionTree

Tags = Tag | Iterable[Tag] | None
# Every operator gets this tag. It promises torch.compile that the schema and the fake kernel are
# correct, and torchop checks both.
_CONTRACT = (Tag.pt2_compliant_tag,)


def declared_schema(
    name: OpName,
    function: Callable[..., Any],
    schema: str | None,
    mutates_args: str | Iterable[str],
    tags: tuple[Tag, ...],
) -> tuple[Schema, Callable[..., Any], Convention]:
    """Return the schema, the kernel and the calling convention for the function of an operator.

    `schema` is the author's hand-written schema, without the operator's name, or None to infer it
    from the annotations. The returned kernel takes arguments as the schema declares them.
    """
    if schema is None:
        return inferred_schema(name, FunctionTree(function, mutates_args, tags), tags)
    parsed = parsed_schema(name, _without_name(schema), tags)
    compare.check_mutation(parsed, mutates_args)
    compare.check_function(parsed, function)
    return parsed, function, FLAT


def inferred_schema(
    name: OpName, tree: FunctionTree, tags: tuple[Tag, ...]
) -> tuple[Schema, Callable[..., Any], Convention]:
    """Return the same values as `declared_schema`, inferred from a function's annotations."""
    parsed = parsed_schema(name, tree.schema_text, tags)
    if tree.is_plain:
        return parsed, tree.function, FLAT
    parsed.places = {leaf.name: leaf.path for leaf in tree.leaves}
    if tree.result is not None:
        parsed.result_places = [leaf.path for leaf in tree.result.leaves()]
    from torchop._schema.structure import convention  # late, because few operators need this

    structured = convention.StructuredConvention(name, tree)
    return parsed, structured.structure.flat_function, structured


def _without_name(schema: object) -> str:
    text = schema.strip() if isinstance(schema, str) else ""
    if not text.startswith("("):
        raise mistake(
            'schema must look like "(Tensor x) -> Tensor", without the name of the operator; got '
            f"{short_repr(schema)}."
        )
    return text


def parsed_schema(name: OpName, text: str, tags: tuple[Tag, ...]) -> Schema:
    """Parse a schema, and catch mistakes that PyTorch reports late or with an unclear message."""
    try:
        parsed = schemas.parse(f"{name}{text}")
    except (RuntimeError, IndexError, TypeError, UnicodeError) as error:
        raise mistake(
            f"the schema {short_repr(text)} does not parse: {short_text(error)}"
        ) from None
    arguments = parsed.arguments
    names = [argument.name for argument in arguments]
    if len(names) > MAX_ARGUMENTS:
        raise mistake(
            f"the schema has {len(names)} arguments, but PyTorch takes at most {MAX_ARGUMENTS}. "
            "Each field of a structure is an argument; pass values of one type as a list or a dict."
        )
    repeated = next((each for each in names if names.count(each) > 1), None)
    if repeated is not None:
        raise mistake(f"the schema has two arguments {repeated!r}. Rename one of them.")
    form = form_of(tags)
    if form is Form.PLAIN:
        form = form_of_schema(parsed)
    else:
        check_form(form, parsed)
    if parsed.is_mutable:
        check_maybe_out(parsed)
    tensors = [a.name for a in arguments if a.kwarg_only and "Tensor" in str(a.real_type)]
    if tensors and form is not Form.OUT:
        raise mistake(
            f"custom_op with kwarg-only Tensor args ({', '.join(tensors)}): they could have no "
            f"gradient. Move them before the '*'. Got {parsed}.",
            NotImplementedError,
        )
    return Schema(parsed, f"{name.local}{text}", form)


def checked_tags(tags: Tags) -> tuple[Tag, ...]:
    if tags is None:
        return _CONTRACT
    members = tuple(tags) if isinstance(tags, Iterable) else (tags,)
    for tag in members:
        if not isinstance(tag, Tag):
            raise mistake(f"tags expects torch.Tag members, got {short_repr(tag)}.", TypeError)
    return tuple(dict.fromkeys((*_CONTRACT, *members)))
