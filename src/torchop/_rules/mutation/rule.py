"""Mutation and views: version counters, the tracking of views, and conjugate and negated views.

`x.conj()` has the memory of `x` and a bit that says how to read it. Kernels ignore such bits. They
get the resolved values instead, and what they write is copied into the view, as with PyTorch's own
in-place operators. PyTorch does that for operators that return the one tensor they mutate, and
fails for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.graph import increment_version

from torchop._compat import compilers, dispatch, inductor_writes, libraries
from torchop._compat.classes import DispatchKeySet
from torchop._core.call import (
    map_tensors,
    mutated_tensors,
    named_inputs,
    named_tensors,
    passed,
    returned_result,
)
from torchop._core.contract import storage_of
from torchop._core.declaration import Declaration
from torchop._core.definition import CompiledRule, Definition
from torchop._errors import AliasError
from torchop._rules.mutation.writable import Placed, check_memory, check_overlap, check_version
from torchop._schema.forms import Form
from torchop._schema.schema import Argument


class Mutated(NamedTuple):
    """The compiled rule: which arguments of a call are written."""

    definition: Definition

    def written(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Placed]:
        """The tensors of a call that are written; none for an argument that the call left out."""
        values = passed(self.definition.schema.mutated_places, args, kwargs)
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
    """Increments the versions of the arguments that are mutable in the schema.

    It also hands an operator that mutates the values behind conjugate and negated views.
    """

    @classmethod
    def is_installed_on(cls, declaration: Declaration) -> bool:
        return declaration.schema.is_mutable or declaration.schema.is_view

    def install(self) -> None:
        definition = self.definition
        if definition.schema.is_view:
            libraries.install_view_tracking(definition.library, definition.name.local)
            return
        definition.implement("ADInplaceOrView", self.kernel, with_keyset=True)
        for key in dispatch.MATH_BIT_KEYS:
            definition.implement(key, self._resolve_views, with_keyset=True)

    def install_on_defined(self) -> None:
        if self.definition.schema.is_mutable:
            inductor_writes.register_lowerings(str(self.definition))

    def compile(self) -> Mutated | None:
        return Mutated(self.definition) if self.definition.schema.is_mutable else None

    def repr_text(self) -> str | None:
        mutated = self.definition.schema.mutated
        return "mutates " + ", ".join(mutated) if mutated else None

    @compilers.never_traced
    def kernel(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        definition = self.definition
        mutated = definition.plan[MutationRule]
        assert mutated is not None  # only operators that mutate have this kernel
        written = mutated.written(args, kwargs)
        check_version(definition, written)
        for _, tensor in written:
            increment_version(tensor)
        keyset = keyset & dispatch.AFTER_ADINPLACEORVIEW
        return dispatch.redispatch(definition.overload, keyset, args, kwargs)

    @compilers.never_traced
    def _resolve_views(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        definition, schema = self.definition, self.definition.schema
        # Each view that is written, with the resolved values that the kernel writes into.
        written: list[tuple[Tensor, Tensor]] = []

        def resolved(argument: Argument, tensor: Tensor) -> Tensor:
            if not (tensor.is_conj() or tensor.is_neg()):
                return tensor
            values = tensor.resolve_conj().resolve_neg()
            if argument.is_mutated:
                written.append((tensor, values))
            return values

        values, keywords = map_tensors(schema, args, kwargs, resolved)
        _refuse_shared_memory(definition, args, kwargs, written)
        keyset = dispatch.below_math_bits(keyset)
        result = dispatch.redispatch(definition.overload, keyset, values, keywords)
        with dispatch.without_keys("ADInplaceOrView"):  # the version was counted before
            for view, new in written:
                view.copy_(new)
        if schema.form is Form.PLAIN:
            return result
        return returned_result(schema, args, kwargs)


def _refuse_shared_memory(
    definition: Definition, args: Any, kwargs: Any, written: list[tuple[Tensor, Tensor]]
) -> None:
    """Refuses a view that shares memory with another tensor that is written.

    Each of them would be copied, and the last one that is copied back would win.
    """
    schema = definition.schema
    memory = [storage_of(tensor) for _, tensor in mutated_tensors(schema, args, kwargs)]
    for view, _ in written:
        if memory.count(storage_of(view)) > 1:
            raise AliasError(
                f"{definition} was called with a conjugate or negated view among its mutated "
                f"arguments ({', '.join(schema.mutated)}), and another of them has the same "
                "memory. The kernel gets a copy of such a view, which has memory of its own. Pass "
                "tensors that share no memory, or call x.resolve_conj() or x.resolve_neg() first."
            )
