"""Mutation and views: what autograd must know of an operator that is not functional."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch.autograd.graph import increment_version

from torchop import _compat
from torchop._contract import tensors_in
from torchop._definition import Definition
from torchop._plan import Rule


class Mutated(NamedTuple):
    """The compiled rule: where the mutated arguments of a call stand."""

    positions: tuple[int, ...]
    names: tuple[str, ...]


_NOTHING = Mutated((), ())


class MutationRule(Rule[Mutated]):
    """Counts up the versions of the arguments that a schema says are written."""

    __slots__ = ()

    def install(self) -> None:
        definition = self.definition
        if definition.schema.is_view:
            _compat.install_view_tracking(definition.library, definition.name.local)
        elif definition.schema.is_mutable:
            definition.implement(
                "ADInplaceOrView", _version_counter_kernel(definition), with_keyset=True
            )

    def compile(self) -> Mutated:
        schema = self.definition.schema
        if not schema.is_mutable:
            return _NOTHING
        return Mutated(
            positions=tuple(i for i, a in enumerate(schema.positional) if a.is_mutated),
            names=tuple(a.name for a in schema.keyword_only if a.is_mutated),
        )

    def describe(self) -> str | None:
        mutated = self.definition.schema.mutated
        return "mutates " + ", ".join(mutated) if mutated else None


def _version_counter_kernel(definition: Definition) -> Callable[..., Any]:
    @_compat.never_traced
    def kernel(keyset: _compat.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        mutated = definition.plan[MutationRule]
        # An argument that the dispatcher dropped has its default value, which is no tensor.
        values = [args[position] for position in mutated.positions if position < len(args)]
        values += [kwargs[name] for name in mutated.names if name in kwargs]
        for tensor in tensors_in(values):
            increment_version(tensor)
        return definition.overload.redispatch(
            keyset & _compat.AFTER_ADINPLACEORVIEW, *args, **kwargs
        )

    return kernel
