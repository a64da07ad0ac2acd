"""Probes of the results of a call: what it returns, what it writes, and what its schema says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop import AliasError
from torchop._core.snapshot import overlap
from torchop.extend import Form, named_inputs, named_outputs
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.sizes import each_resized, larger_sizes, sizes_changed, with_size
from torchop.testing._check.subject import Subject
from torchop.testing._contents import check_outputs
from torchop.testing.process_state import restored

# --------------------------------------------------------------------------------------------------
# Probes that read the record of a call


def succeeds(call: Call) -> None:
    """The operator can be called."""
    if call.record.error is not None:
        raise call.record.error


def same_as_contiguous(
    call: Call, expected: Any = None, what: str = "the call", **tolerances: Any
) -> None:
    """The call does the same as on contiguous copies, and writes nothing around its tensors."""
    succeeds(call)
    if call.record.swapped is not None:
        raise call.record.swapped
    if call.record.around:
        raise AssertionError(f"{what}: the call wrote into the memory around {call.record.around}.")
    expected = call.contiguous if expected is None else expected
    try:
        probes.assert_same(call.record.outcome, expected, what, **tolerances)
    except AssertionError:
        writes_every_element(call, what)
        raise


def same_or_refused(call: Call, what: str) -> None:
    """The call raises, or does the same as on arguments that share no memory."""
    if call.record.error is None:
        probes.assert_same(call.record.outcome, call.contiguous, what)


def writes_every_element(call: Call, what: str = "the call", **tolerances: Any) -> None:
    """The call leaves no element of its results as `torch.empty` made it."""
    succeeds(call)
    if call.record.mutation is not None:
        return  # the arguments are others than before
    for index, (one, other) in enumerate(zip(call.record.outcome, _in_zeros(call), strict=True)):
        try:
            probes.assert_same([one], [other], what, **tolerances)
        except AssertionError:
            place = f"result {index} of {len(call.record.outcome)}"
            raise AssertionError(
                f"{what}: {place} has elements that the kernel does not write. It is "
                f"{probes.shown(one)} if torch.empty returns NaN or the largest integer, and "
                f"{probes.shown(other)} if it returns zeros."
            ) from None


def _in_zeros(call: Call) -> list[Any]:
    """The outcome of the call where `torch.empty` returns zeros."""
    if all(t.is_contiguous() for t in call.tensors if probes.is_plain(t)):
        return call.contiguous
    probes.free_zeros(probes.tensors_of(call.record.outcome))
    return call.again()


def keeps_its_schema(call: Call) -> None:
    """The call writes the arguments that its schema declares, and returns fresh memory."""
    succeeds(call)
    if call.record.mutation is not None:
        raise call.record.mutation
    given, schema = call.record.given, call.schema
    assert given is not None
    outputs = list(named_outputs(call.record.result))
    if schema.is_functional:
        inputs = list(named_inputs(schema, *given))
        for (where, tensor), (argument, name, other) in itertools.product(outputs, inputs):
            if _share_memory(tensor, other):
                raise AliasError(
                    f"{where} of {schema} is in the memory of {name}: Argument {argument} is "
                    "not defined to alias output but was aliasing, directly or through NumPy or "
                    "DLPack. Return a copy, such as a clone."
                )
        for (where, tensor), (other_place, other) in itertools.combinations(outputs, 2):
            if _share_memory(tensor, other):
                raise AliasError(
                    f"{where} and {other_place} of {schema} are in one memory: return a copy of "
                    "one of them."
                )
        example = call.example.copy()
        # A kernel that returns the same tensor each time gives one caller the result of another.
        later = dict(named_outputs(call.op(*example.args, **example.kwargs)))
        for where, tensor in outputs:
            if where in later and _share_memory(tensor, later[where]):
                raise AliasError(
                    f"{where} of {schema} is the same memory in two calls: the kernel returned a "
                    "tensor that it keeps. Return a fresh one, such as a clone."
                )
        return
    written = probes.written(probes.written_places(call.op), *given)
    for (where, tensor), written_one in zip(outputs, written, strict=False):
        returns_it = schema.form in (Form.INPLACE, Form.OUT)
        if returns_it and tensor is not written_one and not _is_same_view(tensor, written_one):
            raise AliasError(
                f"{where} of {schema} is not the argument that the schema says it is: the "
                "kernel must write into the argument and return it."
            )
    check_outputs(schema, call.op, *call.example)


def _share_memory(left: Tensor, right: Tensor) -> bool:
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return left is right
    # NumPy and DLPack share memory by a second storage that wraps it.
    return overlap(left.untyped_storage(), right.untyped_storage())


def _is_same_view(left: Tensor, right: Tensor) -> bool:
    if not probes.is_plain(left) or not probes.is_plain(right):
        return True
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape


def right_in_blocks(call: Call, expected: Any = None, what: str = "", **options: Any) -> None:
    """Every element of a result is written, and it is that of a reference, if there is one."""
    if options.get("values", True):
        writes_every_element(call, what)
    if expected is not None:
        same_as_contiguous(call, expected, what, **options)


# --------------------------------------------------------------------------------------------------
# Probes of digits


# --------------------------------------------------------------------------------------------------
# Batches, rows and threads


def repeats_its_rows(call: Call, size: int, new: int, **tolerances: Any) -> None:
    """Where an input repeats its rows up to another size, a result repeats its own."""

    def repeated(tensor: torch.Tensor) -> torch.Tensor:
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            tensor = with_size(tensor, dim, new)
        return tensor

    ((_, longer),) = each_resized(call.example, {size: new})
    expected = probes.mapped(call.again(), repeated)
    probes.assert_same(call.again(longer), expected, f"with {new} in place of {size}", **tolerances)


def _have_rows(subject: Subject, example: Example, size: int) -> bool:
    """Whether the results of a few more rows repeat those of an example, and rows are apart."""
    call = Call(subject.op, *example)
    if any(
        t.layout is not torch.strided for t in (*call.tensors, *probes.tensors_of(call.again()))
    ):
        return False

    def rows(tensor: Tensor, change: Any) -> Tensor:
        for dim in (dim for dim, present in enumerate(tensor.shape) if present == size):
            tensor = change(tensor, dim)
        return tensor

    def scaled(tensor: Tensor, dim: int) -> Tensor:
        tensor = tensor.clone()
        if tensor.is_floating_point():
            tensor.select(dim, 0).mul_(100)
        return tensor

    def rest(tensor: Tensor, dim: int) -> Tensor:
        return tensor.narrow(dim, 1, size - 1)

    with contextlib.suppress(Exception):
        for new in (2 * size, 3 * size + 1):
            if not all(subject.is_valid(e) for _, e in each_resized(example, {size: new})):
                return False
            repeats_its_rows(call, size, new, **subject.tolerances)
        other = call.again(example.map(lambda tensor: rows(tensor, scaled)))
        same, again = (probes.mapped(o, lambda t: rows(t, rest)) for o in (call.again(), other))
        tolerances: dict[str, Any] = subject.tolerances
        probes.assert_same(again, same, "the other rows", **tolerances)
        return True
    return False


# PyTorch starts a thread for each 32,768 elements.
_FOR_THREE_THREADS, _SIZES_FOR_THREADS = 2**16, (16385, 65537)


def ignores_num_threads(
    call: Call, draws: bool = False, is_large: bool = False, **tolerances: Any
) -> None:
    """The call does the same with any number of threads.

    If it `draws` random numbers, they may differ. If it `is_large`, it may add up in another order,
    and choose another one of equal elements.
    """

    def outcome() -> Any:
        def compared(tensor: torch.Tensor) -> torch.Tensor:
            differs = draws or (is_large and not tensor.is_floating_point())
            return torch.zeros_like(tensor) if differs else tensor

        return probes.mapped(call.again(), compared)

    expected = outcome()
    if is_large:
        tolerances = {**probes.rounding(torch.float16, expected), **tolerances}
    for number in (1, 2, 3, 5):
        with restored():
            torch.set_num_threads(number)
            actual = outcome()
        words = f"with torch.set_num_threads({number})"
        probes.assert_same(actual, expected, words, **tolerances)


def num_threads(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do the same with any number of threads?"""
    for example in subject.accepted(most=1):
        options = {"draws": subject.is_random, **subject.tolerances}
        yield Case("the example", example, probe=ignores_num_threads, options=options)
        results = probes.tensors_of(subject.first_calls[subject.place(example)].record.outcome)
        for change in larger_sizes(example, _SIZES_FOR_THREADS, results):
            for _, larger in each_resized(example, change):
                most = max(tensor.numel() for tensor in larger.tensors)
                (size,) = change
                # With sizes that do not fit, a kernel in C++ may read what lies beyond.
                is_used = any(size in result.shape for result in results)
                if most > _FOR_THREE_THREADS and is_used and _have_rows(subject, example, size):
                    options = {**options, "is_large": True}
                    label = sizes_changed(change)
                    yield Case(label, larger, None, "size", ignores_num_threads, options)
                    return


def same_for_each(call: Call, places: Sequence[int], leading: int, **tolerances: Any) -> None:
    """A batch in the leading dimensions of the tensors at these places is done one by one."""
    _is_one_by_one(call, places, leading, **tolerances)


def _is_one_by_one(call: Call, places: Sequence[int], leading: int, **tolerances: Any) -> bool:
    """Whether results have the shape of a batch; raises AssertionError if one of it is wrong."""
    together = probes.tensors_of(call.again())
    tensors = call.tensors
    batch = tensors[places[0]].shape[:leading]
    for index in itertools.product(*map(range, batch)):
        chosen = [t[index] if place in places else t for place, t in enumerate(tensors)]
        alone = probes.tensors_of(call.again(call.example.with_tensors(chosen)))
        for one, other in zip(together, alone, strict=True):
            if one.shape != batch + other.shape:
                return False
            what = f"{[*index]} of a batch of {one.dim()} dimensions"
            probes.assert_same([one[index]], [other], what, **tolerances)
    return True


_MOST_DIMS = 6


def many_dims(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do with five and six dimensions what it does with fewer?

    Only if one more dimension, of three or four, is that of a batch.
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
                    yield Case(
                        f"{most + leading} dimensions",
                        _batched(few, places, leading),
                        group="size",
                        probe=same_for_each,
                        options={"leading": leading, **options},
                    )
                return
    raise CannotCheck("no result has a leading dimension for one of the arguments")


def _batched(example: Example, places: Sequence[int], leading: int) -> Example:
    """Return the example with leading dimensions of size 2, with other values in each place."""

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
            return _is_one_by_one(Call(subject.op, *example), leading=1, **options)
    return False
