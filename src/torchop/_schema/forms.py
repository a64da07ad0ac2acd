"""In-place and out=: PyTorch's two conventions for operators that mutate their arguments.

An in-place operator mutates and returns its first argument. An out= operator writes its results
into keyword-only tensors, whose previous values it never reads, and returns these tensors. PyTorch
2.13 added the tags `torch.Tag.inplace` and `torch.Tag.out` for these conventions. In older
releases, only the schema shows whether an operator follows one of them.
"""

from __future__ import annotations

import enum
import typing
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from torchop._compat.classes import FunctionSchema, Tag
from torchop._errors import SchemaError, mistake
from torchop._schema import types
from torchop._schema.text import numbered_alias, write_results, written_tensor


class Form(enum.Enum):
    """The convention by which an operator mutates arguments.

    Attributes:
        PLAIN: neither in-place nor out=.
        INPLACE: the operator mutates and returns its first argument.
        OUT: the operator mutates and returns keyword-only arguments.

    Example:
        >>> from torchop.extend import Form, Operator
        >>> Operator("aten::add.out", "my_tool").schema.form is Form.OUT
        True
    """

    PLAIN = "plain"
    INPLACE = "torch.Tag.inplace"
    OUT = "torch.Tag.out"

    @property
    def tags(self) -> tuple[Tag, ...]:
        """The tag for this convention, such as `torch.Tag.out`. Empty before PyTorch 2.13."""
        return tuple(tag for tag, form in _FORMS.items() if form is self)


def form_of(tags: Iterable[Tag]) -> Form:
    forms = [_FORMS[tag] for tag in tags if tag in _FORMS]
    if len(set(forms)) > 1:  # torch.library also raises an AssertionError
        raise AssertionError("torch.Tag.inplace and torch.Tag.out are mutually exclusive")
    return forms[0] if forms else Form.PLAIN


_FORMS: dict[Tag, Form] = {
    tag: form
    for name, form in (("inplace", Form.INPLACE), ("out", Form.OUT))
    if (tag := getattr(Tag, name, None)) is not None
}


def form_of_schema(parsed: FunctionSchema) -> Form:
    if not parsed.is_mutable or not parsed.returns:
        return Form.PLAIN
    forms = (form for form in (Form.INPLACE, Form.OUT) if _problem(form, parsed) is None)
    return next(forms, Form.PLAIN)


def returned_alias(
    form: Form, where: str, annotation: Any, arguments: Sequence[str], mutated: Sequence[str]
) -> str:
    """Return the results of an in-place or out= operator, in schema syntax.

    Each result aliases a mutated argument. `check_form` checks later whether an in-place or out=
    operator may mutate these arguments.
    """
    written = [
        index
        for index, name in enumerate(arguments)
        if (index == 0 if form is Form.INPLACE else name in mutated)
    ]
    count = len(written)
    if count and not returns_tensors(annotation, count):
        expected = torch.Tensor if count == 1 else tuple[(torch.Tensor,) * count]  # type: ignore[misc]
        raise SchemaError(
            f"{where}: {form.value} requires the return annotation {types.spell(expected)}, "
            f"because the operator returns the mutated tensors; got {types.spell(annotation)}."
        )
    return write_results([written_tensor(numbered_alias(index)) for index in written])


def returns_tensors(annotation: Any, count: int) -> bool:
    if count == 1:
        return annotation is torch.Tensor
    # Compare the origins, because typing.Tuple[X] != tuple[X].
    return (
        typing.get_origin(annotation) is tuple
        and typing.get_args(annotation) == (torch.Tensor,) * count
    )


def check_form(form: Form, parsed: FunctionSchema) -> None:
    """Raise SchemaError if the schema does not fit the operator's in-place or out= tag."""
    problem = _problem(form, parsed)
    if problem is not None:
        raise mistake(f"the operator is tagged {form.value}, but {problem}. Got {parsed}.")


def _problem(form: Form, parsed: FunctionSchema) -> str | None:
    mutable = [a for a in parsed.arguments if a.alias_info is not None and a.alias_info.is_write]
    problem = _inplace_problem(parsed, mutable) if form is Form.INPLACE else _out_problem(mutable)
    return problem or _return_problem(parsed.returns, mutable)


def _inplace_problem(parsed: FunctionSchema, mutable: Sequence[Any]) -> str | None:
    first = parsed.arguments[0] if parsed.arguments else None
    if first is None or first.kwarg_only:
        return "it has no positional argument; the first one must be a Tensor(a!)"
    if str(first.real_type) != "Tensor":
        kind = first.real_type
        return f"its first positional argument {first.name!r} is not a Tensor but {kind}"
    if [argument.name for argument in mutable] != [first.name]:
        return (
            f"it must mutate only its first positional argument {first.name!r}: write "
            f"mutates_args=({first.name!r},)"
        )
    return None


def _out_problem(mutable: Sequence[Any]) -> str | None:
    if not mutable:
        return "it mutates no argument; name at least one keyword-only Tensor in mutates_args"
    positional = [argument.name for argument in mutable if not argument.kwarg_only]
    if positional:
        names = ", ".join(positional)
        return (
            f"its mutable arguments must be keyword-only, but {names} is not; move it after a '*'"
        )
    for argument in mutable:
        if str(kind := argument.real_type) != "Tensor":
            return f"the tag only supports Tensors to mutate, and {argument.name} has type {kind}"
    return None


def _return_problem(returns: Sequence[Any], mutable: Sequence[Any]) -> str | None:
    rule = "its return must alias the mutated arguments"
    expected = ", ".join(f"{_spell_alias(a.alias_info)} for {a.name}" for a in mutable)
    if len(returns) != len(mutable):
        return f"{rule}: it returns {len(returns)} values instead of {expected}"
    for index, (result, argument) in enumerate(zip(returns, mutable, strict=True)):
        alias = result.alias_info
        if str(result.real_type) != "Tensor":
            return f"{rule}: return {index} is a {result.real_type} instead of a Tensor"
        if (
            alias is None
            or not alias.is_write
            or alias.before_set != argument.alias_info.before_set
        ):
            text = "no alias" if alias is None else _spell_alias(alias)
            return f"{rule}, {expected}, in order: return {index} is {text}"
    return None


def _spell_alias(alias: Any) -> str:
    names = "|".join(sorted(name.rpartition("::")[2] for name in alias.before_set))
    return f"Tensor({names}{'!' if alias.is_write else ''})"
