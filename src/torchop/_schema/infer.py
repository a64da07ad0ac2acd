"""`infer_schema`: infer a schema from the annotations of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torchop._compat import schemas
from torchop._compat.classes import Tag
from torchop._errors import naming
from torchop._schema import signatures
from torchop._schema.forms import Form, check_form, form_of
from torchop._schema.tree import FunctionTree


def infer_schema(
    prototype_function: Callable[..., Any],
    /,
    *,
    mutates_args: str | Iterable[str],
    op_name: str | None = None,
    tags: Tag | Iterable[Tag] | None = (),
) -> str:
    """Infer a schema from the annotations of a function.

    Args:
        prototype_function: a function with annotated parameters and result. Annotations may be
            strings.
        mutates_args: the names of the tensor arguments that the function mutates. `"unknown"` means
            that it may mutate any of them.
        op_name: the name of the operator, which is prepended to the schema.
        tags: the tags of the operator. With `torch.Tag.inplace` or `torch.Tag.out`, the results
            alias the mutated arguments.

    Returns:
        The schema, such as `"(Tensor pic, SymInt[] box) -> Tensor"`.

    Raises:
        SchemaError: an annotation is missing or unsupported. The message names the parameter and
            the closest supported type. SchemaError is a subclass of `ValueError`.

    Example:
        >>> import torch, torchop
        >>> def crop(pic: torch.Tensor, box: list[int], scale: float = 1.0) -> torch.Tensor: ...
        >>> torchop.infer_schema(crop, mutates_args=())
        '(Tensor pic, SymInt[] box, float scale=1.0) -> Tensor'

    Based on `torch.library.infer_schema`.
    """
    all_tags = (tags,) if isinstance(tags, Tag) else tuple(tags or ())
    with naming(signatures.spell_function(prototype_function)):
        tree = FunctionTree(prototype_function, mutates_args, all_tags, structures=False)
        text, form = tree.schema_text, form_of(all_tags)
        if form is not Form.PLAIN:
            check_form(form, schemas.parse(f"f{text}"))
    return f"{op_name or ''}{text}"
