"""Mutation and views: version counters, and the tracking of views for autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.autograd.graph import increment_version

from torchop._compat import compilers, dispatch, libraries
from torchop._compat.classes import DispatchKeySet
from torchop._core.call import named_inputs, named_tensors, passed
from torchop._core.declaration import Declaration
from torchop._core.definition import CompiledRule, Definition
from torchop._rules.mutation.writable import Placed, check_memory, check_overlap, check_version
from torchop._schema.forms import Form


class Mutated(NamedTuple):
    """The compiled rule: which arguments of a call are written."""

    definition: Definition
    places: tuple[tuple[int, str], ...]

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Placed]:
        """The tensors of a call that are written; none for an argument that the call left out."""
        values = passed(self.places, args, kwargs)
        return [(where, tensor) for _, where, tensor in named_tensors(values, "argument")]

    def read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Placed]:
        """The tensors of a call that are not written."""
        mutated = self.definition.schema.mutated
        named = named_inputs(self.definition.schema, args, kwargs)
        return [(where, tensor) for name, where, tensor in named if name not in mutated]

    def check_memory(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Refuses memory in which what a kernel writes would be overwritten or read by itself."""
        written = self.written(args, kwargs)
        check_memory(self.definition, written)
        # A kernel with several buffers may allow that they overlap. The in-place form and the out=
        # form promise the result of the functional operator.
        if self.definition.schema.form is not Form.PLAIN:
            check_overlap(self.definition, written, self.read(args, kwargs))


class MutationRule(CompiledRule["Mutated | None"]):
    """Increments the versions of the arguments that are mutable in the schema."""

    @classmethod
    def is_installed_on(cls, declaration: Declaration) -> bool:
        return declaration.schema.is_mutable or declaration.schema.is_view

    def install(self) -> None:
        definition = self.definition
        if definition.schema.is_view:
            libraries.install_view_tracking(definition.library, definition.name.local)
        else:
            definition.implement(
                "ADInplaceOrView", _version_counter_kernel(definition), with_keyset=True
            )

    def compile(self) -> Mutated | None:
        schema = self.definition.schema
        if not schema.is_mutable:
            return None
        return Mutated(self.definition, schema.mutated_places)

    def repr_text(self) -> str | None:
        mutated = self.definition.schema.mutated
        return "mutates " + ", ".join(mutated) if mutated else None


def _version_counter_kernel(definition: Definition) -> Callable[..., Any]:
    @compilers.never_traced
    def kernel(keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        mutated = definition.plan[MutationRule]
        assert mutated is not None  # only operators that mutate have this kernel
        written = mutated.written(args, kwargs)
        check_version(definition, written)
        for _, tensor in written:
            increment_version(tensor)
        keyset = keyset & dispatch.AFTER_ADINPLACEORVIEW
        return dispatch.redispatch(definition.overload, keyset, args, kwargs)

    return kernel
