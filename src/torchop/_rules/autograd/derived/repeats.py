"""Detect operator bodies that return different values when they are rerun.

A derived backward formula reruns the operator's body in the backward pass. It restores the state of
PyTorch's random number generators, but a body may also depend on NumPy's or Python's generators, a
counter or the time. In that case, the gradient would not match the results of the forward pass.
"""

from __future__ import annotations

import random
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from torchop._compat import devices, functorch, tracing
from torchop._core.definition import Definition
from torchop._errors import GradientError
from torchop._rules.autograd.derived.saved_call import SavedCall
from torchop._rules.autograd.gradients import is_differentiable

# The number of comparisons so far, per operator and combination of non-tensor arguments, because a
# body may draw random numbers only for some values of these arguments, such as `training=True`.
_comparisons: weakref.WeakKeyDictionary[Definition, dict[str, int]] = weakref.WeakKeyDictionary()
# Compare several times, because two runs may agree by chance, for example if a random mask has only
# one element.
_ENOUGH = 3
_MOST_KEYS = 32
# The largest allowed difference between two runs, relative to the largest value. It is far above
# the rounding errors of kernels with a nondeterministic summation order.
_TOLERANCE = 1e-3
_TOLERANCE_OF_SMALL_DTYPES = 5e-2


def check_repeats(
    definition: Definition,
    call: SavedCall,
    outputs: Sequence[Tensor | None],
    run_again: Callable[[], Sequence[Tensor | None]],
) -> None:
    """Raise GradientError if rerunning the body does not reproduce `outputs`.

    Only the first few runs with the same arguments are compared, so later backward passes stay
    fast.
    """
    tensors = [tensor for tensor in outputs if tensor is not None]
    counts = _comparisons.setdefault(definition, {})
    key = repr(call)
    count = counts.get(key, 0 if len(counts) < _MOST_KEYS else _ENOUGH)
    if count >= _ENOUGH or any(map(_has_no_values, tensors)) or devices.are_captured(tensors):
        return
    before = dict(_states())
    with torch.no_grad():
        again = run_again()
    for name, state in _states():
        if state != before.get(name, state):
            raise _not_repeatable(definition, f"the body draws numbers from {name}")
    for index, (one, other) in enumerate(zip(outputs, again, strict=True)):
        if one is not None and other is not None and not _are_close(one.detach(), other.detach()):
            raise _not_repeatable(
                definition, f"output {index} has other values when the body runs again"
            )
    counts[key] = count + 1


def _states() -> Iterator[tuple[str, object]]:
    """Yield the name and state of each random number generator outside PyTorch."""
    yield "Python's module random", random.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, words, *rest = numpy.get_state()
        yield "numpy.random", (kind, words.tobytes(), *rest)


def _not_repeatable(definition: Definition, problem: str) -> GradientError:
    return GradientError(
        f"{definition}: the derived formula runs the body again in the backward, but {problem}, so "
        "the gradient would be wrong. Draw random numbers with PyTorch's functions, such as "
        "torch.rand, whose generators the formula restores, or pass such values as arguments. Or "
        f"register a formula with register_autograd({str(definition)!r}, backward, "
        "setup_context=...)."
    )


def _has_no_values(tensor: Tensor) -> bool:
    return functorch.is_wrapped(tensor) or tracing.has_no_data(tensor)


def _are_close(one: Tensor, other: Tensor) -> bool:
    if one.layout is not torch.strided or not one.is_cpu:
        return True  # comparing values on an accelerator would wait for it
    if one.shape != other.shape or one.dtype is not other.dtype:
        return False
    if not is_differentiable(one):
        return True
    is_small = one.dtype.itemsize // (2 if one.is_complex() else 1) < 4
    tolerance = _TOLERANCE_OF_SMALL_DTYPES if is_small else _TOLERANCE
    finite = one[torch.isfinite(one)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=0, atol=tolerance * largest, equal_nan=True)
