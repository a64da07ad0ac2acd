"""Dispatcher kernels for operators that mutate arguments.

These kernels bump version counters, and resolve conjugate and negative views. For example,
`x.conj()` shares the memory of `x` and only sets the conjugate bit, but the operator's own kernel
ignores this bit. So the operator's kernel receives a copy with the conjugation applied, and the
values that it writes are copied back into the view. PyTorch has fallbacks for conjugate and
negative views, but they only support operators that mutate a single tensor and return it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
from torchop._core.contract import share_memory
from torchop._core.definition import Definition
from torchop._errors import AliasError
from torchop._rules.mutation.writable import Placed, check_memory, check_overlap, check_version
from torchop._schema.forms import Form
from torchop._schema.schema import Argument


def written(definition: Definition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Placed]:
    values = passed(definition.schema.mutated_places, args, kwargs)
    named = named_tensors(values, "argument", definition.schema.places)
    return [(where, tensor) for _, where, tensor in named]


def read(definition: Definition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Placed]:
    mutated = definition.schema.mutated
    named = named_inputs(definition.schema, args, kwargs)
    return [(where, tensor) for name, where, tensor in named if name not in mutated]


def check_arguments(definition: Definition, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise if a mutated tensor overlaps itself or (for in-place and out= forms) an input."""
    writes = written(definition, args, kwargs)
    check_memory(definition, writes)
    # In-place and out= forms must compute the same values as the functional operator, so reject
    # overlapping inputs. The kernels of other operators may support overlapping buffers.
    if definition.schema.form is not Form.PLAIN:
        check_overlap(definition, writes, read(definition, args, kwargs))


def install(definition: Definition) -> Callable[[], None] | None:
    if definition.schema.is_view:
        libraries.install_view_tracking(definition.library, definition.name.local)
    if not definition.schema.is_mutable:
        return None
    kernels = _MutationKernels(definition)
    definition.implement("ADInplaceOrView", kernels.count_versions, with_keyset=True)
    for key in dispatch.MATH_BIT_KEYS:
        definition.implement(key, kernels.resolve_views, with_keyset=True)
    return functools.partial(inductor_writes.register_lowerings, str(definition))


class _MutationKernels:
    __slots__ = ("definition",)

    def __init__(self, definition: Definition) -> None:
        self.definition = definition

    @compilers.never_traced
    def count_versions(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        """Bump the versions of mutated tensors. This is the kernel at the ADInplaceOrView key.

        It must bump the same tensors as the C++ functions `count_versions` in csrc/call.cpp and
        csrc/bypass.cpp.
        """
        definition = self.definition
        writes = written(definition, args, kwargs)
        check_version(definition, writes)
        for _, tensor in writes:
            increment_version(tensor)
        keyset = keyset & dispatch.AFTER_ADINPLACEORVIEW
        return dispatch.redispatch(definition.overload, keyset, args, kwargs)

    @compilers.never_traced
    def resolve_views(self, keyset: DispatchKeySet, /, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel on copies of conjugate and negative views, and copy new values back."""
        definition, schema = self.definition, self.definition.schema
        copies: list[tuple[Tensor, Tensor]] = []

        def resolved(argument: Argument, tensor: Tensor) -> Tensor:
            if not (tensor.is_conj() or tensor.is_neg()):
                return tensor
            values = tensor.resolve_conj().resolve_neg()
            if argument.is_mutated:
                copies.append((tensor, values))
            return values

        values, keywords = map_tensors(schema, args, kwargs, resolved)
        _check_shared_memory(definition, args, kwargs, copies)
        keyset = dispatch.below_math_bits(keyset)
        result = dispatch.redispatch(definition.overload, keyset, values, keywords)
        with dispatch.without_keys("ADInplaceOrView"):  # `count_versions` already bumped them
            for view, new in copies:
                view.copy_(new)
        if schema.form is Form.PLAIN:
            return result
        return returned_result(schema, args, kwargs)


def _check_shared_memory(
    definition: Definition, args: Any, kwargs: Any, copies: list[tuple[Tensor, Tensor]]
) -> None:
    """Raise if a mutated conjugate or negative view shares memory with another mutated argument.

    The kernel would write to a copy of the view, and copying the new values back into the view
    would overwrite the values that the kernel wrote to the other argument.
    """
    schema = definition.schema
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    for view, _ in copies:
        if sum(share_memory(view, tensor) for tensor in mutated) > 1:
            raise AliasError(
                f"{definition} was called with a conjugate or negated view among the mutated "
                f"arguments ({', '.join(schema.mutated)}), and another of them has the same "
                "memory. The kernel gets a separate copy of such a view. Pass tensors that share "
                "no memory, or call x.resolve_conj() or x.resolve_neg() first."
            )
