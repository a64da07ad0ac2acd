"""Make one call of an operator and record its effects for probes.

A probe is a function that raises an exception if it finds a bug in the operator.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchop import AliasError, ResultError, UndeclaredMutationError
from torchop._rules.user.examples import EXAMPLES
from torchop.extend import OpOverload, Schema, short_repr, short_text
from torchop.testing import probes
from torchop.testing._snapshot import Snapshot
from torchop.testing.process_state import forks, restored, seed_torch


class CannotCheck(Exception):  # noqa: N818  (not an error, because the check does not fail)
    """Raised to skip a check that cannot run, or a variant that an example does not have."""


class Refused(CannotCheck):
    """Raised if the operator or its reference raises an exception to reject the arguments."""


class ValidError(ValueError):
    """Raised if the `valid` predicate of `register_examples` fails or does not return a bool."""


class ForkError(Exception):
    """Recorded as the error of a call that forked the process, so that the call is not repeated."""


REJECTED = "'valid' of register_examples rejects it"


def breaks_contract(error: BaseException) -> bool:
    """Return whether an exception reports that the kernel violated its schema.

    Any other exception only means that the kernel rejects the arguments.
    """
    ours = isinstance(error, (AliasError, ResultError, UndeclaredMutationError))
    # torch.library.custom_op raises a RuntimeError, so recognize it by its message.
    return ours or "may not alias any inputs to this custom operator" in text_of(error)


class Example(NamedTuple):
    """The positional and keyword arguments of one call, as the operator's schema defines them."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def tensors(self) -> list[Tensor]:
        return probes.tensors_of(tuple(self))

    def map(self, change: Callable[[Tensor], Any]) -> Example:
        return Example(*probes.mapped(tuple(self), change))

    def replace(self, index: int, tensor: Tensor) -> Example:
        tensors = self.tensors
        return self.with_tensors([*tensors[:index], tensor, *tensors[index + 1 :]])

    def with_tensors(self, tensors: Sequence[Tensor]) -> Example:
        return Example(*probes.with_tensors(tuple(self), tensors))

    def with_argument(self, name: str, value: Any) -> Example:
        return Example(self.args, {**self.kwargs, name: value})

    def copy(self) -> Example:
        return Example(*probes.copies(tuple(self)))

    def equals(self, other: Example) -> bool:
        """Return whether all tensors have equal values, even if their layouts differ."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(torch.equal(a, b) for a, b in pairs if probes.is_plain(a) and probes.is_plain(b))


def is_valid(op: OpOverload, example: Example) -> bool:
    valid = EXAMPLES.valid(op)
    if valid is None:
        return True
    args, kwargs = example.copy()
    try:
        with restored(), torch.no_grad():
            answer = valid(*args, **kwargs)
    except Exception as error:
        raise ValidError(
            f"'valid' of register_examples raised {reason(error)}. Return False for arguments "
            f"that no caller may pass; these were {short_repr(tuple(example))}."
        ) from error
    if not isinstance(answer, bool):
        raise ValidError(
            f"'valid' of register_examples returned {short_repr(answer)}. Return True or False."
        )
    return answer


@dataclass(frozen=True)
class Record:
    """The effects of one call.

    Attributes:
        result: the return value.
        outcome: copies of the results and of the arguments that the operator writes to.
        given: the arguments, in their state after the call.
        error: the exception that the call raised, if any.
        swapped: an exception if the call replaced the storage or the strides of an argument that
            it may write to.
        mutation: an exception if the call made any mutation that the schema does not declare.
            Replacing a storage or strides, as in `swapped`, counts too.
        around: the name of the first argument around which the call changed memory, if any.
    """

    result: Any = None
    outcome: Sequence[Any] = ()
    given: Example | None = None
    error: Exception | None = None
    swapped: Exception | None = None
    mutation: Exception | None = None
    around: str = ""


class Call:
    """One call of an operator, which is made lazily when `record` is first read.

    During this call, `torch.empty` returns memory filled with NaN or with the largest integer.
    Probes make a second call, during which `torch.empty` returns zeros, and compare the results. If
    they differ, the kernel does not write every element.
    """

    def __init__(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None):
        self.op, self.example = op, Example(tuple(args), dict(kwargs or {}))
        self.schema = Schema(op._schema)
        # The record of the same call with the reference kernel, or None before that call is made.
        self.reference: Record | None = None

    @property
    def args(self) -> Any:
        return self.example.args

    @property
    def kwargs(self) -> Any:
        return self.example.kwargs

    @property
    def names(self) -> list[str]:
        """A name such as "argument 'xs[1]'" for each tensor, for use in messages."""
        return probes.argument_names(self.op, *self.example)

    @property
    def tensors(self) -> list[Tensor]:
        return self.example.tensors

    @property
    def differentiable(self) -> list[str]:
        pairs = zip(self.names, self.tensors, strict=True)
        return [name for name, tensor in pairs if tensor.requires_grad]

    def again(self, example: Any = None) -> list[Any]:
        """Call the operator on copies of the arguments, or of `example`, and return the outcome.

        The outcome consists of the results and of the arguments that the operator writes to.
        """
        return probes.outcome_of_copies(self.op, *(self.example if example is None else example))

    def function(self) -> tuple[Any, list[Tensor]]:
        """Return the call as a function of the tensors that require grad, and these tensors."""
        return probes.as_function(self.op, *self.example.copy())

    # Probes must change values through the following three methods, which apply the `valid`
    # predicate of `register_examples`. Finite differences are the only exception, because their
    # steps are too small to matter.

    def changed(self, change: Callable[[Tensor], Any]) -> Example:
        return self.valid(self.example.map(change))

    def valid(self, example: Example) -> Example:
        if not is_valid(self.op, example):
            raise CannotCheck(REJECTED)
        return example

    def other_values(self, steps: int = 1) -> Example:
        """Return the example with the elements of each tensor rotated.

        If the `valid` predicate of `register_examples` rejects the rotated tensors, return the
        example unchanged.
        """
        example = Example(*probes.other_values(tuple(self.example), steps))
        return example if is_valid(self.op, example) else self.example

    @functools.cached_property
    def record(self) -> Record:
        given = self.example.copy()
        snapshot = Snapshot(self.schema, *given)
        writable = probes.written(probes.written_places(self.op), *given)
        before = [(t.shape, probes.memory_around(t, writable)) for t in given.tensors]
        process, forked = os.getpid(), forks()
        seed_torch(0)
        try:
            with filled_memory():
                result = self.op(*given.args, **given.kwargs)
        except Exception as error:
            return Record(error=error, given=given)
        finally:
            if os.getpid() != process:  # a child that the kernel forked must not continue here
                os._exit(1)
        if forks() != forked:
            return Record(error=ForkError("a call forks the process"), given=given)
        around = ""
        for name, tensor, (shape, memory) in zip(self.names, given.tensors, before, strict=True):
            # An operator may resize an out= argument, which may then cover some of the memory that
            # surrounded it. So compare this memory only if the shape has not changed.
            is_same = tensor.shape == shape
            if is_same and not torch.equal(probes.memory_around(tensor, writable), memory):
                around = around or name
        written = probes.written(probes.written_places(self.op), *given)
        outcome = probes.copies(probes.leaves(result) + written)
        swapped, mutation = (
            _raised(check, self.op.name()) for check in (snapshot.check_layouts, snapshot.check)
        )
        return Record(result, outcome, given, None, swapped, mutation, around)

    @functools.cached_property
    def contiguous(self) -> list[Any]:
        """The outcome of a call on contiguous copies, during which `torch.empty` returns zeros."""
        outcomes: list[list[Any]] = [[]]
        # If a result contains NaN, the NaN may come from uninitialized memory, so repeat the call.
        # Keep the outcomes of all calls alive, so that each call must allocate different memory.
        while len(outcomes) == 1 or (_have_nan(outcomes[-1]) and len(outcomes) < 8):
            example = probes.contiguous_copies(tuple(self.example))
            probes.free_zeros(probes.tensors_of((example, outcomes[-1])))
            outcomes.append(probes.copies(probes.outcome(self.op, *example)))
            if _have_nan(example):
                break
        return outcomes[-1]


def _raised(check: Callable[[object], None], name: str) -> Exception | None:
    try:
        check(name)
    except UndeclaredMutationError as error:
        return error
    return None


def _have_nan(values: Any) -> bool:
    tensors = map(probes.dense, probes.tensors_of(values))
    # PyTorch cannot compare floating-point dtypes of 8 bits or fewer, so skip them.
    return any(t.is_floating_point() and t.itemsize > 1 and t.isnan().any() for t in tensors)


@contextlib.contextmanager
def filled_memory() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns about nondeterministic functions
            yield
    finally:
        torch.set_deterministic_debug_mode(before)


def text_of(error: BaseException | None) -> str:
    try:
        return str(error).strip()
    except Exception:  # raised by `__str__` of the exception
        return "(its text cannot be read)"


def reason(error: BaseException | None) -> str:
    """Format the class and the message of an exception on one line."""
    return f"{type(error).__name__}: {short_text(text_of(error) or '(no message)')}"
