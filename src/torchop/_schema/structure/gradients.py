"""The gradients of structured results, as arguments of backward kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchop._schema import types
from torchop._schema.kinds import KINDS, leaf_kind
from torchop._schema.structure.nodes import Leaf, Node, Variables
from torchop._schema.structure.source import Source

_KINDS = {
    "Tensor": torch.Tensor,
    "Tensor?": torch.Tensor | None,
    "Tensor[]": list[torch.Tensor],
}


class GradientsOf:
    """Annotates a backward kernel's parameter that receives the gradients of a result.

    `statics_of` maps the number of a layout to the static (non-tensor) parts of the result, such as
    strings and dict keys. It is None for operators whose results have no static parts.
    """

    def __init__(
        self,
        annotation: Any,
        result: Node,
        statics_of: Callable[[int], Mapping[str, Any]] | None,
    ) -> None:
        self.annotation = annotation
        self.result = result
        self.statics_of = statics_of

    def __repr__(self) -> str:
        return types.spell(self.annotation)

    def node(self, path: str) -> Node:
        return Gradients(path, self)


class Gradients(Node):
    """The gradients of a structured result, passed as an instance of the result's class.

    The schema has one argument for each tensor in the result. If the result also has parts that are
    not tensors, an additional argument holds a number that identifies the values of these parts.
    """

    def __init__(self, path: str, of: GradientsOf) -> None:
        self._of = of
        self._leaves: dict[str, Leaf] = {}  # by the name of the leaf in the result
        for leaf in of.result.leaves():
            if leaf.is_tensor:
                place = path + leaf.path.removeprefix(of.result.path)
                kind = leaf_kind(_KINDS[leaf.kind.schema])
                assert kind is not None
                self._leaves[leaf.name] = Leaf(place, _name(place), kind)
        parts = list(self._leaves.values())
        self.layout = None
        if of.statics_of is not None:
            place = f"{path}.layout"
            self.layout = Leaf(place, _name(place), KINDS[int]._replace(is_optional=True))
            parts.append(self.layout)
        super().__init__(path, parts)

    def set_default(self, value: Any) -> None:
        """Set no defaults, because gradients have none."""

    def keys_of_tensors(self) -> Iterator[Leaf]:
        if self.layout is not None:
            yield self.layout

    def flatten(self, source: Source, value: str, variables: Variables) -> None:
        names = ", ".join(variables[leaf.name] for leaf in self._leaves.values())
        source.line(f"{names}, = {source.object(self._spread_values, 'gradients')}({value})")
        if self.layout is not None:
            source.line(f"{variables[self.layout.name]} = None")

    def _spread_values(self, value: Any) -> tuple[Any, ...]:
        flat = self.spread(value, {})
        return tuple(
            [] if flat[leaf.name] is None and leaf.kind.schema == "Tensor[]" else flat[leaf.name]
            for leaf in self._leaves.values()
        )

    def rebuild(self, source: Source, variables: Variables) -> str:
        values = ", ".join(f"{leaf.name!r}: {variables[leaf.name]}" for leaf in self.leaves())
        return f"{source.object(self.gather, 'gradients')}({{{values}}})"

    def gather(self, values: Mapping[str, Any]) -> Any:
        gradients = {name: values.get(leaf.name) for name, leaf in self._leaves.items()}
        return self._of.result.gather({**self._statics(values), **gradients})

    def spread(self, value: Any, known: Mapping[str, Any]) -> dict[str, Any]:
        flat = self._of.result.spread(value, self._statics(known))
        return {leaf.name: flat.get(name) for name, leaf in self._leaves.items()}

    def _statics(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        number = None if self.layout is None else values.get(self.layout.name)
        if number is None or self._of.statics_of is None:
            return {}
        return self._of.statics_of(number)


def _name(path: str) -> str:
    return re.sub(r"\W+", "_", path).strip("_")
