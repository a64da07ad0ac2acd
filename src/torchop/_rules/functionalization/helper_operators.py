"""Helper operators that replace mutating operators in functional traces.

If an operator mutates arguments, a compiler may trace a helper operator in its place. The helper
operator calls the original operator, but has a schema that functionalization and Inductor handle
correctly:

- `name__mutable` mutates the same arguments but does not return them. A list that may contain None
  becomes a list of tensors and a mask. An argument named `mode` is renamed, because PyTorch passes
  the arguments by keyword to a function that already has a parameter `mode`.
- `name__functional` mutates nothing. Instead, it returns the new values of the mutated arguments
  after the results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import compilers
from torchop._core.call import Call, as_tuple, map_arguments, map_tensors, values_by_name
from torchop._core.definition import Definition
from torchop._rules.helper_operators import HelperOperator
from torchop._rules.in_autocast import copy_with_strides
from torchop._schema.forms import Form
from torchop._schema.schema import Argument, Schema
from torchop._schema.text import with_keyword_only, without_writes

# Helper operators rename an argument `mode` to this name, because PyTorch's functionalization fails
# with `mode`. A user's operator is unlikely to have another argument with this name.
_MODE = "torchop_mode"
_NAMED_MODE = re.compile(r"^(\S+) mode(?==|$)")
_LIST_WITH_NONE = re.compile(r"Tensor(\(\w+!\))?\?\[\d*\]")


def masks(schema: Schema) -> dict[str, str]:
    """Return the name of the mask argument for each mutated list argument that may contain None.

    A mask marks the items of the list that are not None.
    """
    return {
        argument.name: f"{argument.name}_given"
        for argument in schema.arguments
        if argument.is_mutated and "List[Optional[" in argument.kind
    }


def is_misread(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call mutates a list that contains None, or passes an argument `mode`.

    PyTorch's functionalization handles neither of these calls correctly.
    """
    values = values_by_name(schema, args, kwargs)
    return "mode" in values or any(t is None for n in masks(schema) for t in values.get(n) or ())


def without_none(schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
    names = masks(schema)
    given: dict[str, list[bool] | None] = dict.fromkeys(names.values())

    def split(argument: Argument, value: Any) -> Any:
        if argument.name not in names or value is None:
            return value
        given[names[argument.name]] = [tensor is not None for tensor in value]
        return [tensor for tensor in value if tensor is not None]

    args, keywords = map_arguments(schema, args, kwargs, split)
    return args, {_MODE if n == "mode" else n: v for n, v in {**keywords, **given}.items()}


class Mutable(HelperOperator):
    """The helper operator `name__mutable`."""

    kind = "mutable"

    def __init__(self, definition: Definition) -> None:
        super().__init__(definition)
        self._masks = masks(definition.schema)
        self._returns_arguments = definition.schema.form is not Form.PLAIN

    def written_arguments(self) -> list[str]:
        arguments = [_NAMED_MODE.sub(rf"\1 {_MODE}", a) for a in super().written_arguments()]
        if self._masks:
            arguments = [_LIST_WITH_NONE.sub(r"Tensor\1[]", argument) for argument in arguments]
        # Masks have no default, so add them as keyword-only arguments: a required positional
        # argument must not follow an argument with a default.
        return with_keyword_only(arguments, [f"bool[]? {name}" for name in self._masks.values()])

    def written_results(self) -> list[str]:
        return [] if self._returns_arguments else super().written_results()

    @compilers.never_traced
    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        definition, names = self.definition, self._masks
        kwargs = {"mode" if name == _MODE else name: value for name, value in kwargs.items()}

        def with_none(argument: Argument, value: Any) -> Any:
            mask = kwargs[names[argument.name]] if argument.name in names else None
            tensors = iter(value) if mask is not None else iter(())
            return value if mask is None else [next(tensors) if there else None for there in mask]

        args, keywords = map_arguments(definition.schema, args, kwargs, with_none)
        returned = definition.overload(*args, **keywords)
        return None if self._returns_arguments else returned


class Functional(HelperOperator):
    """The helper operator `name__functional`."""

    kind = "functional"
    further_results = ("Tensor[]",)

    def written_arguments(self) -> list[str]:
        return list(map(without_writes, super().written_arguments()))

    @compilers.never_traced
    def kernel(self, *args: Any, **kwargs: Any) -> Any:
        written: list[Tensor] = []

        def copied(argument: Argument, tensor: Tensor) -> Tensor:
            if not argument.is_mutated:
                return tensor
            written.append(copy_with_strides(tensor))
            return written[-1]

        definition = self.definition
        args, keywords = map_tensors(definition.schema, args, kwargs, copied)
        returned = definition.overload(*args, **keywords)
        return (*as_tuple(definition.schema, returned), written)
