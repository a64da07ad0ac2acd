"""The memory layouts that a kernel may require of its arguments."""

from __future__ import annotations

import typing
from collections.abc import Mapping

import torch
from torch import Tensor

from torchop._errors import ArgumentError, SchemaError, mistake
from torchop._schema.schema import Schema


class Layout:
    """A memory layout that a kernel requires of an argument, `contiguous` or `channels_last`.

    Declare it in a parameter's annotation, as in `Annotated[Tensor, torchop.contiguous]`, or pass
    it to `torchop.register_layout`. If a call passes a tensor with other strides, the kernel
    receives a copy that has the required layout.

    Example:
        >>> import torch, torchop
        >>> from typing import Annotated
        >>> @torchop.custom_op("docs::flat_sum", mutates_args=())
        ... def flat_sum(x: Annotated[torch.Tensor, torchop.contiguous]) -> torch.Tensor:
        ...     return x.view(-1).sum()
        >>> flat_sum(torch.ones(2, 3).t())
        tensor(6.)
    """

    __slots__ = ("formats", "name")

    def __init__(self, name: str, formats: Mapping[int, torch.memory_format]) -> None:
        self.name = name
        self.formats = formats  # by number of dimensions; empty if the format is always the same

    def __repr__(self) -> str:
        return f"torchop.{self.name}"

    def __reduce__(self) -> str:
        return self.name  # pickle looks the name up in this module

    @property
    def is_channels_last(self) -> bool:
        return bool(self.formats)

    def format_of(self, tensor: Tensor) -> torch.memory_format:
        found = self.formats.get(tensor.dim()) if self.formats else torch.contiguous_format
        if found is None:
            raise ArgumentError(
                f"{self!r} needs a tensor with 4 or 5 dimensions, got the shape "
                f"{tuple(tensor.shape)}."
            )
        return found

    def fits(self, tensor: Tensor) -> bool:
        """Return whether a tensor has this layout. Tensors without strides fit every layout."""
        if tensor.layout not in _WITH_STRIDES:
            return True
        return tensor.is_contiguous(memory_format=self.format_of(tensor))

    def copied(self, tensor: Tensor) -> Tensor:
        """Return the tensor itself if it already has this layout, or else a converted copy."""
        if tensor.layout not in _WITH_STRIDES:
            return tensor
        return tensor.contiguous(memory_format=self.format_of(tensor))


_WITH_STRIDES = (torch.strided, torch.jagged)
contiguous = Layout("contiguous", {})
channels_last = Layout("channels_last", {4: torch.channels_last, 5: torch.channels_last_3d})


def declared_layouts(annotations: Mapping[str, object]) -> dict[str, Layout]:
    """Return a dict from parameters to the memory layouts that their annotations declare."""
    found: dict[str, Layout] = {}
    for name, annotation in annotations.items():
        layouts = dict.fromkeys(_layouts_in(annotation))
        if not layouts or name == "return":
            continue
        if len(layouts) > 1:
            spelled = ", ".join(map(repr, layouts))
            raise mistake(f"parameter {name!r} declares the layouts {spelled}. Keep one.")
        (found[name],) = layouts
    return found


def _layouts_in(annotation: object) -> list[Layout]:
    if isinstance(annotation, Layout):
        return [annotation]
    return [layout for item in typing.get_args(annotation) for layout in _layouts_in(item)]


def check_layouts(schema: Schema, layouts: Mapping[str, object]) -> None:
    if not layouts:
        return  # most operators declare no layouts, and computing `schema.arguments` is slow
    kinds = {argument.name: argument for argument in schema.arguments}
    for name, layout in layouts.items():
        if not isinstance(layout, Layout):
            raise SchemaError(
                f"{schema.name}: the layout of {name!r} is {layout!r}. Pass torchop.contiguous or "
                "torchop.channels_last."
            )
        if name not in kinds or not kinds[name].holds_tensors:
            tensors = ", ".join(n for n, argument in kinds.items() if argument.holds_tensors)
            raise SchemaError(
                f"{schema.name}: a layout is declared for {name!r}, which is not a tensor "
                f"argument. The tensor arguments are {tensors or '(none)'}."
            )
