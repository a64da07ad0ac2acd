"""Check that kernels treat the last elements of a dimension like all others."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example
from torchop.testing._check.relations import has_fixed_values
from torchop.testing._check.sizes import resized

# Multiples of common vector widths and unroll factors. Both exceed `sizes.ODD`, so an operator that
# splits rows into groups of up to `ODD` elements splits these rows into groups, too.
_MULTIPLES = (192, 384)
# Sizes that fit into a single block of most kernels.
_SMALL = (8, 12)
# The order of additions affects rounding errors. So an integer result, such as a quantized one, may
# be rounded up in one call and down in another.
_INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def treats_elements_alike(call: Call, size: int) -> None:
    """Check that permuting the elements of a dimension only permutes the results.

    A faulty vectorized kernel may handle only the first `size // 8 * 8` elements. After a
    permutation, other elements are at the end, so the results are different. The results of a
    correct operator, such as `cumsum`, may also depend on the order of elements. So the check fails
    only if, for sizes that are multiples of common vector widths, permuting the elements merely
    permutes the results.

    Results may lack the dimension, as in a sum or in attention. In this case, the check also fails
    if the order matters for `size` but not for small sizes, because a faulty kernel may combine the
    results of several blocks incorrectly.
    """
    problem = None
    for problem in _differences(call, call.example, size):
        if problem is None:
            return
    if problem is None:
        return
    is_reduced = not any(size in t.shape for t in probes.tensors_of(call.record.outcome))
    for others in (_MULTIPLES, _SMALL) if is_reduced else (_MULTIPLES,):
        if not any(_depends_on_order_if_resized(call, size, other) for other in others):
            raise AssertionError(
                f"{problem} The elements were permuted in dimensions of size {size}, which only "
                f"permutes the results for sizes {others[0]} and {others[1]}. The kernel seems to "
                "handle the last block of elements differently."
            )


def _depends_on_order_if_resized(call: Call, size: int, other: int) -> bool:
    try:
        return depends_on_order(call, call.valid(resized(call.example, {size: other})), other)
    except Exception:  # the operator refuses this size
        return True


def depends_on_order(call: Call, example: Example, size: int) -> bool:
    """Return whether permuting the elements in dimensions of `size` changes the results."""
    return any(_differences(call, example, size))


def _differences(call: Call, example: Example, size: int) -> Iterator[AssertionError | None]:
    """Yield the difference that each of several permutations makes, or None if it makes none."""
    if any(size in t.shape and has_fixed_values(t, example) for t in example.tensors):
        return
    example = call.valid(example.map(_distinct))
    before = call.again(example)
    if not all(map(probes.is_plain, probes.tensors_of(before))):
        return
    for seed in range(3):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
        permute = functools.partial(_permuted, order)
        try:
            after = call.again(call.valid(example.map(permute)))
        except CannotCheck:
            yield None
            continue
        expected = probes.mapped(before, permute)
        try:
            probes.assert_same(after, expected, "after a permutation", **_tolerances(before))
        except AssertionError as error:
            yield error
        else:
            yield None


def _tolerances(outcome: Sequence[Any]) -> dict[str, Any]:
    is_low = any(t.dtype is torch.bfloat16 for t in probes.tensors_of(outcome))
    rounding = probes.rounding(torch.bfloat16 if is_low else torch.float16, outcome)
    return {**rounding, "tolerance": dict.fromkeys(_INTEGERS, (0.0, 1.0))}


def _distinct(tensor: Tensor) -> Tensor:
    """Scale floating-point elements by distinct factors of at most 1.

    Resized examples repeat their elements, so a permutation could leave a result unchanged.
    """
    if not tensor.dtype.is_floating_point or not probes.is_plain(tensor):
        return tensor
    factors = torch.linspace(0.75, 1, tensor.numel(), dtype=torch.double, device=tensor.device)
    return (tensor.double() * factors.view(tensor.shape)).to(tensor.dtype)


def _permuted(order: Tensor, tensor: Tensor) -> Any:
    if probes.is_plain(tensor):
        for dim, size in enumerate(tensor.shape):
            if size == len(order):
                tensor = tensor.index_select(dim, order.to(tensor.device))
    return tensor
