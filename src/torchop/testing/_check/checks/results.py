"""Probes that check the results of a call."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from torchop import AliasError
from torchop.extend import Form, named_inputs, named_outputs
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.order import (
    depends_on_order,
    treats_elements_alike,
)
from torchop.testing._check.sizes import TILES, repeated, resized
from torchop.testing._check.subject import Subject
from torchop.testing._contents import check_outputs
from torchop.testing._snapshot import overlap
from torchop.testing.process_state import restored

# The bound on rounding errors, as a multiple of the change of the result when each input moves by
# one unit in the last place. It is above 1 because kernels round intermediate results too.
_ROUNDING = 16


def succeeds(call: Call) -> None:
    if call.record.error is not None:
        raise call.record.error


def same_as_contiguous(
    call: Call, expected: Any = None, what: str = "the call", **tolerances: Any
) -> None:
    """Check that the outcome agrees with `expected`, or with a call on contiguous copies.

    Also check that the call does not write to the memory around its tensors.
    """
    succeeds(call)
    if call.record.swapped is not None:
        raise call.record.swapped
    if call.record.around:
        raise AssertionError(f"{what}: the call wrote into the memory around {call.record.around}.")
    outcome = call.contiguous if expected is None else expected
    try:
        probes.assert_same(call.record.outcome, outcome, what, **tolerances)
    except AssertionError:
        writes_every_element(call, what)  # has a clearer message if elements are uninitialized
        is_exact = expected is not None or tolerances.keys() & {"rtol", "atol"}
        if is_exact or not _differs_by_rounding(call, outcome):
            raise


def _differs_by_rounding(call: Call, expected: Sequence[Any]) -> bool:
    """Return whether the outcome differs from `expected` by no more than amplified rounding errors.

    Kernels may add numbers in another order if the layout differs. Most results then change by a
    few units in the last place, but some operators amplify rounding errors: normalizing a row of
    equal numbers divides them by almost 0. So move each input by one unit in the last place, and
    allow errors in proportion to the change of the result.
    """

    def moved(share: float) -> list[Any]:
        def change(tensor: Tensor) -> Tensor:
            if not (tensor.dtype.is_floating_point and tensor.itemsize > 1):
                return tensor.clone()
            step = share * torch.finfo(tensor.dtype).eps * probes.signs_like(tensor)
            return (tensor.detach().double() * (1 + step)).to(tensor.dtype)

        example = Example(*probes.contiguous_copies(tuple(call.changed(change))))
        return probes.outcome(call.op, *example)

    try:
        nearby = [moved(share) for share in (1.0, -1.0)]
    except Exception:  # the operator or `valid` rejects the moved inputs
        return False
    for each in zip(call.record.outcome, expected, call.contiguous, *nearby, strict=True):
        if not all(isinstance(value, Tensor) and value.shape == each[0].shape for value in each):
            return False
        one, other, still, *moves = (_in_full(value) for value in each)
        change = torch.stack([(move - still).abs() for move in moves]).amax(0)
        # Some elements may not change by chance, so add the mean change to the bound of every
        # element.
        bound = _ROUNDING * (change + change.nanmean())
        is_same = (one == other) | (one.isnan() & other.isnan())
        if not bool((is_same | ((one - other).abs() <= bound)).all()):
            return False
    return True


def _in_full(tensor: Tensor) -> Tensor:
    plain = probes.dense(tensor.detach())
    return plain.to(torch.complex128 if plain.is_complex() else torch.double)


def has_declared_layouts(call: Call) -> None:
    """Check that the result does not depend on the strides of an argument with a declared layout.

    torchop's Autograd kernel copies such an argument into its declared layout. The dispatcher skips
    this kernel in inference mode, so repeat the check in inference mode.
    """
    expected = call.contiguous
    for what, mode in (("", contextlib.nullcontext), (" in inference mode", torch.inference_mode)):
        with mode():
            probes.assert_same(call.again(), expected, f"with other strides{what}")


def same_or_refused(call: Call, what: str) -> None:
    """Check that the call either raises or returns correct results.

    The results must agree with a call on contiguous copies, which do not share memory.
    """
    if call.record.error is None:
        probes.assert_same(call.record.outcome, call.contiguous, what)


def resizes_outputs(call: Call, example: Any) -> None:
    """Check that a call with `out=` arguments of another shape raises, or gives the right results.

    The right results are the results for `example`, in which the `out=` arguments have the right
    shapes.
    """
    if call.record.error is None:
        what = "with out= arguments of another shape"
        try:
            probes.assert_same(call.record.outcome, call.again(example), what)
        except AssertionError as error:
            raise AssertionError(
                f"{error} Resize them with torch's resize_, or raise an error."
            ) from None


def writes_every_element(call: Call, what: str = "the call", **tolerances: Any) -> None:
    """Check that no element of the results is uninitialized memory from `torch.empty`."""
    succeeds(call)
    if call.record.mutation is not None:
        return  # the first call modified its arguments, so a second call may differ
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
    # A faulty kernel may read the memory around its arguments. Contiguous copies have no such
    # memory, so use them only if the arguments fill their storages completely.
    if all(t.nbytes == t.untyped_storage().nbytes() for t in call.tensors if probes.is_plain(t)):
        return call.contiguous
    probes.free_zeros(probes.tensors_of(call.record.outcome))
    return call.again()


def keeps_its_schema(call: Call) -> None:
    """Check that the call mutates only declared arguments and returns tensors in fresh memory."""
    succeeds(call)
    if call.record.mutation is not None:
        raise call.record.mutation
    given, schema = call.record.given, call.schema
    assert given is not None
    outputs = list(named_outputs(call.record.result))
    _is_plain_data(call, outputs)
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
                    f"{where} and {other_place} of {schema} share memory. Return a copy of one."
                )
        example = call.example.copy()
        # Call the operator again. If the kernel returns a tensor that it caches, both results are
        # in the same memory, so the second call would overwrite the first result.
        later = dict(named_outputs(call.op(*example.args, **example.kwargs)))
        for where, tensor in outputs:
            if where in later and _share_memory(tensor, later[where]):
                raise AliasError(
                    f"{where} of {schema} is in the same memory in two calls, because the kernel "
                    "returns a tensor that it keeps. Return a fresh tensor, such as a clone."
                )
        return
    written = probes.written(probes.written_places(call.op), *given)
    for (where, tensor), written_one in zip(outputs, written, strict=False):
        returns_it = schema.form in (Form.INPLACE, Form.OUT)
        if returns_it and tensor is not written_one and not _is_same_view(tensor, written_one):
            raise AliasError(
                f"{where} of {schema} is not the argument that the schema declares. Write into "
                "the argument, and return it."
            )
    check_outputs(schema, call.op, *call.example)


def _is_plain_data(call: Call, outputs: list[tuple[str, Tensor]]) -> None:
    """Check that the kernel does not return inference tensors or tensors that require grad.

    Compiled programs return ordinary tensors instead, so they would differ from eager mode.
    """
    if any(t.requires_grad or t.is_inference() for t in call.tensors):
        return
    for where, tensor in outputs:
        if tensor.requires_grad:
            raise AssertionError(
                f"{where} of {call.schema} requires grad, but no argument does. Return a detached "
                "tensor, and register a gradient formula."
            )
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise AssertionError(
                f"{where} of {call.schema} is an inference tensor, so autograd cannot save it for "
                "the backward. Do not enable inference mode in the kernel; use torch.no_grad."
            )


def negative_means_from_the_end(call: Call, name: str, value: int) -> None:
    """Check that a negative dimension counts from the end, unless the call raises."""
    succeeds(call)
    expected = call.again(call.valid(call.example.with_argument(name, value)))
    what = f"{name}={call.kwargs[name]}, compared with {name}={value}"
    probes.assert_same(call.again(), expected, what)


def _share_memory(left: Tensor, right: Tensor) -> bool:
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return left is right
    # NumPy and DLPack create a second storage for the same memory, so compare the addresses of the
    # storages instead of their identity.
    return overlap(left.untyped_storage(), right.untyped_storage())


def _is_same_view(left: Tensor, right: Tensor) -> bool:
    if not probes.is_plain(left) or not probes.is_plain(right):
        return True
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape


_DIMENSIONS = ("dim", "axis")


def negative_dim(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a negative dimension count from the end, or is it refused?"""
    subject.needs_fixed_results()
    for example in subject.accepted():
        named = subject.by_name(example)
        # Ignore index tensors, because they may have another number of dimensions.
        dims = {t.dim() for t in example.tensors if not probes.has_integers(t)} or {
            t.dim() for t in example.tensors
        }
        results = subject.first_calls[subject.place(example)].record.outcome
        # In operators such as `stack`, `dim` is a dimension of the result, so skip the example.
        if len(dims) != 1 or any(t.dim() > max(dims) for t in probes.tensors_of(results)):
            continue
        (count,) = dims
        for name in _DIMENSIONS:
            value = named.kwargs.get(name)
            if type(value) is int and 0 <= value < count:
                changed = named.with_argument(name, value - count)
                options = {"name": name, "value": value}
                label = f"{name}={value - count}"
                yield Case(label, changed, None, "scalar", negative_means_from_the_end, options)
    raise CannotCheck(f"no argument is named {' or '.join(_DIMENSIONS)}")


def repeated_results(subject: Subject, call: Call) -> tuple[int, list[Any]] | None:
    """Predict the outcome of a call with one enlarged size from calls with smaller sizes.

    Return the enlarged size and the outcome.

    The larger tensors repeat the elements of the example. If the results for three small sizes
    repeat the example's results in the same way, so must the results for the large size. Otherwise,
    return None, for example for a mean over this dimension.
    """
    (example,) = subject.accepted(most=1)
    changes = {
        (old, new)
        for before, after in zip(example.tensors, call.tensors, strict=True)
        for old, new in zip(before.shape, after.shape, strict=True)
        if old != new
    }
    outcome = Call(subject.op, *example).again()
    if len(changes) != 1 or not all(map(probes.is_plain, probes.tensors_of(outcome))):
        return None
    ((size, new),) = changes
    for other in (2 * size, 2 * size + 1, 3 * size - 1):
        try:
            resized_call = Call(subject.op, *resized(example, {size: other}))
            probes.assert_same(resized_call.again(), repeated(outcome, size, other), "")
        except Exception:
            return None
    return new, repeated(outcome, size, new)


def right_in_blocks(
    call: Call,
    expected: Any = None,
    what: str = "",
    repeated_to: int | None = None,
    odd: int | None = None,
    **options: Any,
) -> None:
    """Check that the call writes every element of its results, and that they match `expected`.

    If `repeated_to` is given, `expected` was computed by `repeated_results`, which has enlarged the
    results to this size. If `odd` is given, also permute the elements in dimensions of this size,
    and compare the results.
    """
    if options.get("values", True):
        writes_every_element(call, what)
    if expected is not None:
        try:
            same_as_contiguous(call, expected, what, **options)
        except AssertionError:
            if repeated_to is None or not (
                _splits_rows(call, repeated_to, expected) or _differs_by_rounding(call, expected)
            ):
                raise
    if odd is not None:
        treats_elements_alike(call, odd)


def _splits_rows(call: Call, size: int, expected: Sequence[Any]) -> bool:
    """Return whether the operator seems to split a dimension into groups, as in quantization.

    If `size` is not a multiple of the group size, the last group is smaller than the others. Then
    the results need not repeat like the arguments do, and may have one element per group.
    """
    outcomes = (call.record.outcome, expected)
    actual_shapes, shapes = ([t.shape for t in probes.tensors_of(list(each))] for each in outcomes)
    if actual_shapes != shapes:
        return True
    if size % TILES[-1] == 0:
        return False
    try:
        whole = call.valid(resized(call.example, {size: TILES[-1]}))
        return depends_on_order(call, whole, TILES[-1])
    except Exception:  # the operator refuses this size
        return True


def ignores_num_threads(
    call: Call, draws: bool = False, is_large: bool = False, **tolerances: Any
) -> None:
    """Check that results do not depend on the number of threads.

    Two differences are allowed. If `draws` is true, the call draws random numbers, which may depend
    on the number of threads. If `is_large` is true, PyTorch splits the call among several threads.
    Then the number of threads may affect the order of additions and the choice between equal
    elements.
    """

    def outcome() -> Any:
        def compared(tensor: torch.Tensor) -> torch.Tensor:
            differs = draws or (is_large and not tensor.is_floating_point())
            return torch.zeros_like(tensor) if differs else tensor

        return probes.mapped(call.again(), compared)

    expected = outcome()
    if is_large:
        tolerances = {**probes.rounding(torch.float16, expected), **tolerances}
    try:
        probes.assert_same(outcome(), expected, "an equal call", **tolerances)
    except AssertionError as error:
        # Skip the check, because this is not a bug of the operator. Enlarged arguments may be
        # inconsistent with each other, so the kernel may read out of bounds and return arbitrary
        # values.
        raise CannotCheck(f"equal calls give different results: {error}") from None
    for number in (1, 2, 3, 5):
        with restored():
            torch.set_num_threads(number)
            actual = outcome()
        words = f"with torch.set_num_threads({number})"
        probes.assert_same(actual, expected, words, **tolerances)
