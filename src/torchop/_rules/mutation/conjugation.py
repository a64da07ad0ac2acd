"""Conjugate and negated views as arguments of an operator that mutates.

`x.conj()` has the memory of `x` and a bit that says how to read it. Kernels ignore such bits. They
get the resolved values instead, and what they write is copied into the view, as with PyTorch's own
in-place operators. PyTorch does that for operators that return the one tensor they mutate, and
fails for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchop._compat import compilers, dispatch
from torchop._compat.classes import DispatchKeySet
from torchop._core.call import map_tensors, mutated_tensors, returned_result
from torchop._core.contract import storage_of
from torchop._core.declaration import Declaration
from torchop._core.definition import CompiledRule, Definition
from torchop._errors import AliasError
from torchop._schema.forms import Form
from torchop._schema.schema import Argument


class ConjugationRule(CompiledRule[None]):
    """Hands an operator that mutates the values behind conjugate and negated views."""

    @classmethod
    def is_installed_on(cls, declaration: Declaration) -> bool:
        return declaration.schema.is_mutable

    def install(self) -> None:
        definition = self.definition
        for key in dispatch.MATH_BIT_KEYS:
            definition.implement(key, _resolving_kernel(definition), with_keyset=True)

    def compile(self) -> None:
        return None


def _resolving_kernel(definition: Definition) -> Callable[..., Any]:
    schema = definition.schema

    @compilers.never_traced
    def kernel(keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
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

    return kernel


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
