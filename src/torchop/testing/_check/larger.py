"""Checks of larger inputs: many dimensions; and which results repeat the rows of inputs."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchop.testing import probes
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.subject import CannotCheck, Case, Example, Subject
from torchop.testing._check.variants import resized, with_size

_MOST_DIMS = 6

# --------------------------------------------------------------------------------------------------
# Probes


def repeats_its_rows(
    op: Any, args: Any, kwargs: Any, size: int, new: int, **tolerances: Any
) -> None:
    """Where an input repeats its rows up to another size, a result repeats its own."""
    few = probes.outcome_of_copies(op, args, kwargs)
    actual = probes.outcome(op, *resized(Example(args, kwargs), {size: new}))

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            tensor = with_size(tensor, dim, new)
        return tensor

    expected = probes.mapped(few, repeated)
    probes.assert_same(actual, expected, f"with {new} in place of {size}", **tolerances)


def same_for_each(
    op: Any, args: Any, kwargs: Any, places: Sequence[int], leading: int, **tolerances: Any
) -> None:
    """A batch in the leading dimensions of the tensors at these places is done one by one."""
    _is_one_by_one(op, args, kwargs, places, leading, **tolerances)


def _is_one_by_one(
    op: Any, args: Any, kwargs: Any, places: Sequence[int], leading: int, **tolerances: Any
) -> bool:
    """Whether results have the shape of a batch; raises AssertionError if one of it is wrong."""
    together = probes.outcome_of_copies(op, args, kwargs)
    tensors = probes.tensors_of((args, kwargs))
    batch = tensors[places[0]].shape[:leading]
    for index in itertools.product(*map(range, batch)):
        chosen = [t[index] if place in places else t for place, t in enumerate(tensors)]
        alone = probes.outcome_of_copies(op, *probes.with_tensors((args, kwargs), chosen))
        for one, other in zip(probes.tensors_of(together), probes.tensors_of(alone), strict=True):
            if one.shape != batch + other.shape:
                return False
            what = f"{[*index]} of a batch of {one.dim()} dimensions"
            probes.assert_same([one[index]], [other], what, **tolerances)
    return True


# --------------------------------------------------------------------------------------------------
# Cases


def repeated_results(subject: Subject, example: Example, size: int) -> list[torch.Tensor]:
    """The results of an example, if those of a few more rows repeat theirs; none otherwise."""
    if subject.refusal(example) is not None:
        return []
    args, kwargs = example
    results = probes.tensors_of(probes.outcome_of_copies(subject.op, args, kwargs))
    is_strided = all(t.layout is torch.strided for t in (*example.tensors, *results))
    if not is_strided or not any(size in result.shape for result in results):
        return []
    try:
        for new in (2 * size, 3 * size + 1):
            if not subject.is_valid(resized(example, {size: new})):
                return []
            repeats_its_rows(subject.op, args, kwargs, size, new, **subject.tolerances)
        for factor in (100, -100):
            _assert_rows_apart(subject, example, size, factor, **subject.tolerances)
    except Exception:
        return []
    return results


def _assert_rows_apart(
    subject: Subject, example: Example, size: int, factor: int, **tolerances: Any
) -> None:
    """Raises AssertionError if other values in the first of so many rows change other results."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            if tensor.is_floating_point():
                tensor.select(dim, 0).mul_(factor)
        return tensor

    def others(tensor: torch.Tensor) -> torch.Tensor:
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            tensor = tensor.narrow(dim, 1, size - 1)
        return tensor

    calls = example, example.map(changed)
    if not subject.is_valid(calls[1]):
        return
    outcomes = [probes.outcome_of_copies(subject.op, *call) for call in calls]
    first, again = (probes.mapped(outcome, others) for outcome in outcomes)
    probes.assert_same(again, first, "the other rows", **tolerances)


def many_dims(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do with five and six dimensions what it does with fewer?

    It is asked only if one more dimension, of three or four, is that of a batch.
    """
    subject.needs_fixed_results()
    for example in subject.accepted(most=1):
        tensors = example.tensors
        sized = [p for p, t in enumerate(tensors) if probes.is_plain(t) and t.dim() and t.numel()]
        for places in (sized, sized[:1]) if sized else ():
            few = example.with_tensors(
                [t[(0,) * (t.dim() - 3)] if p in places else t for p, t in enumerate(tensors)]
            )
            most = max(few.tensors[place].dim() for place in places)
            options: dict[str, Any] = {"places": places, **subject.tolerances}
            if _takes_a_batch(subject, _batched(few, places, 1), options):
                for leading in range(2, _MOST_DIMS + 1 - most):
                    label = f"{most + leading} dimensions"
                    batch = _batched(few, places, leading)
                    yield Case(label, same_for_each, batch, None, {"leading": leading, **options})
                return
    raise CannotCheck("no result has a leading dimension for one of the arguments")


def _batched(example: Example, places: Sequence[int], leading: int) -> Example:
    """The example with so many leading dimensions of size 2, with other values in each place."""

    def batched(tensor: torch.Tensor) -> torch.Tensor:
        other = tensor if probes.has_integers(tensor) else probes.rolled_elements(tensor, 1)
        batch = torch.stack([tensor, other])
        for _ in range(leading - 1):
            batch = torch.stack([batch, batch.flip(0)])
        return batch

    tensors = enumerate(example.tensors)
    return example.with_tensors([batched(t) if p in places else t for p, t in tensors])


def _takes_a_batch(subject: Subject, example: Example, options: dict[str, Any]) -> bool:
    """Whether one leading dimension is that of a batch, which is done one by one."""
    with contextlib.suppress(Exception):
        if subject.refusal(example) is None:
            return _is_one_by_one(subject.op, *example, leading=1, **options)
    return False


CHECKS = family("memory", many_dims)
