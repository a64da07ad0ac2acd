"""Checks that calls of the operator do not affect the results of later calls."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import io
from collections.abc import Iterator
from typing import Any

import torch

from torchop._compat import on_demand
from torchop.extend import Schema, named_inputs
from torchop.testing import probes
from torchop.testing._check.calls import Call, CannotCheck, Example, reason
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.results import writes_every_element
from torchop.testing._check.sizes import each_resized, sizes
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import in_dtype, other_scalars
from torchop.testing._fork import Worker, WorkerError, can_fork
from torchop.testing.process_state import restored

# The time limit in seconds for a call in a fork. A slower call is killed, and its results are not
# compared.
_LONGEST_CALL = 5.0


def has_no_memory(call: Call, others: Any) -> None:
    """Check that earlier calls do not change the results of a call."""
    first = call.again()
    single = [(f"another one ({number})", [other]) for number, other in enumerate(others)]
    for what, calls in [*single, ("several others", others)]:
        for other in calls:
            with contextlib.suppress(Exception):  # even failed calls must not change later results
                call.again(other)
        probes.assert_same(call.again(), first, f"the same call after {what}", rtol=0, atol=0)
    _ignores_freed_arguments(call, first)
    # A faulty kernel may use the addresses of its arguments as cache keys. To detect this, change
    # the tensors in place and compare with calls on copies, which have other addresses.
    try:
        call.changed(_minus_twice)
    except CannotCheck:
        return
    same = tuple(call.example.copy())
    probes.outcome(call.op, *same)
    probes.mapped(same, lambda t: t.copy_(_minus_twice(t)))
    # Make 32 copies, because the allocator may place some copies at the addresses of earlier
    # arguments.
    elsewhere = [probes.copies(same) for _ in range(32)]
    try:
        here, *there = (probes.outcome(call.op, *each) for each in (same, *elsewhere))
    except Exception:
        return  # the operator refuses these values
    for each in there:
        probes.assert_same(here, each, "other values at the same address", rtol=0, atol=0)


def _ignores_freed_arguments(call: Call, first: list[Any]) -> None:
    """Check that a call returns the right results if its arguments reuse freed memory.

    A faulty kernel may use the addresses of its arguments as cache keys. Adding the version counter
    to the key would not help, because a new tensor in the freed memory of an earlier argument has
    the same version counter too.
    """
    other, memory = call.other_values(), call.example.copy()
    try:
        expected = call.again(other)
    except Exception:
        return  # the operator refuses the other values

    def placed(values: Example) -> Example:
        pairs = zip(memory.tensors, values.tensors, strict=True)
        return values.with_tensors([_placed(*pair) for pair in pairs])

    for example, right in ((call.example, first), (other, expected), (call.example, first)):
        what = "other values in the memory of earlier arguments"
        probes.assert_same(probes.outcome(call.op, *placed(example)), right, what, rtol=0, atol=0)


def _placed(memory: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Write values into the memory of a tensor, and return a new tensor in this memory."""
    if not probes.is_plain(memory) or memory.is_neg() or memory.is_conj():
        return values.clone()
    writer, made = (
        torch.empty(0, dtype=memory.dtype, device=memory.device).set_(
            memory.untyped_storage(), memory.storage_offset(), memory.shape, memory.stride()
        )
        for _ in range(2)
    )
    writer.copy_(values)
    return made


def _minus_twice(tensor: torch.Tensor) -> torch.Tensor:
    return _linear(tensor, factor=-2)


def _linear(tensor: torch.Tensor, *, factor: int, summand: int = 0) -> torch.Tensor:
    """Return `factor * tensor + summand`, or the tensor itself if it is not floating-point.

    Ignore `summand` if the tensor is not an ordinary strided tensor.
    """
    if not tensor.is_floating_point():
        return tensor
    product = factor * probes.widened(tensor)
    # PyTorch does not add numbers to sparse tensors.
    return (product + summand if probes.is_plain(tensor) else product).to(tensor.dtype)


def is_the_first(call: Call, before: Any, first: Any) -> None:
    """Check that a call after the call `before` returns `first`, its result in a new process.

    A faulty kernel may keep a value from its first call, such as a lookup table for the sizes of
    that call. All later calls in this process then agree with each other, so only a comparison with
    a new process shows the error.
    """
    with contextlib.suppress(Exception):  # even failed calls must not change later results
        call.again(before)
    what = "the call after a call with other arguments, compared with a new process"
    try:
        again = call.again()
    except Exception as error:
        raise AssertionError(
            f"{what}: it raises {reason(error)} The kernel keeps a value of an earlier call."
        ) from error
    try:
        probes.assert_same(again, first, what)
    except AssertionError:
        writes_every_element(call, what)  # has a clearer message if elements are uninitialized
        raise


def note_first_outcomes(subject: Subject) -> None:
    """Record the outcomes of calls in forked processes, before this process makes any call.

    Each fork makes a single call, so its outcome cannot depend on earlier calls.
    """
    if subject.is_random or not can_fork():
        return
    (example, *_) = subject.examples
    # The first call of an operator of `torch.library` imports Dynamo. Import it before forking, so
    # that the forks do not each import it again.
    on_demand.import_dynamo()
    with contextlib.suppress(CannotCheck, WorkerError):
        others = _others(subject, [], example)["others"]
        # Always include the last call, which passes other values in tensors of the same sizes.
        first, last = others[: _MOST_FORKS - 2], others[_MOST_FORKS - 2 :][-1:]
        in_half = in_dtype(torch.half, example)
        for arguments in (*first, *last, *([tuple(in_half)] if subject.is_valid(in_half) else ())):
            other = Example(*arguments)
            if subject.declined(other) is None:
                subject.first_outcomes.append((other, _in_a_fork(Call(subject.op, *other))))


# Each fork takes about 20 ms.
_MOST_FORKS = 5


def _in_a_fork(call: Call) -> list[Any]:
    def answer(request: None) -> bytes:
        with restored(), torch.no_grad():
            outcome = call.again()
        # Serialize the outcome here. By default, torch sends tensors between processes as handles
        # of shared memory, which are no longer valid once the fork exits.
        file = io.BytesIO()
        torch.save(outcome, file)
        return file.getvalue()

    # The forked process makes the call in a new thread. Run it in a copy of the caller's context,
    # which contains the priority of providers (alternative kernels).
    run = contextvars.copy_context().run
    worker = Worker(lambda request: run(answer, request))
    try:
        saved = worker.ask(None, _LONGEST_CALL)
    finally:
        worker.close()
    outcome: list[Any] = torch.load(io.BytesIO(saved), weights_only=False)
    return outcome


def state(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a call give the same results after other calls?"""
    examples = subject.accepted(most=8)
    for index, example in enumerate(examples[:3]):
        options = functools.partial(_others, subject, [*examples[:index], *examples[index + 1 :]])
        label = "other calls between two equal ones"
        yield Case(label, example, probe=has_no_memory, options=options)
    example = subject.examples[0]
    for other, first in subject.first_outcomes:
        compared = {"before": tuple(example), "first": first}
        # The call succeeded in the fork, so `calls=False` turns an exception here into a failure.
        yield Case(
            "the call in a new process",
            other,
            None,
            "plain",
            is_the_first,
            compared,
            calls=False,
            shrink=False,
        )


def changes_what_it_declares(call: Call, others: Any) -> None:
    """Check that each argument declared as mutated is changed by at least one of several calls."""
    unchanged = {name for name, _, _ in _written(call.schema, call.example)}
    for example in (call.example, *(Example(*other) for other in others)):
        after = example.copy()
        try:
            call.op(*after.args, **after.kwargs)
        except Exception:
            continue  # the operator refuses these arguments
        pairs = zip(_written(call.schema, example), _written(call.schema, after), strict=True)
        for (name, _, before), (_, _, tensor) in pairs:
            with contextlib.suppress(AssertionError):
                probes.assert_same([tensor], [before], "", rtol=0, atol=0)
                continue
            unchanged.discard(name)
        if not unchanged:
            return
    raise AssertionError(
        f"argument {sorted(unchanged)[0]} is declared as mutated, but no call changes it. Write "
        "into the argument, or remove it from mutates_args."
    )


def _written(schema: Schema, example: Example) -> list[tuple[str, str, torch.Tensor]]:
    return [each for each in named_inputs(schema, *example) if each[0] in schema.mutated]


def written(subject: Subject, details: Details) -> Iterator[Case]:
    """Is each argument that the schema declares as mutated changed by some call?"""
    if not subject.schema.is_mutable:
        raise CannotCheck("nothing is declared as mutated")
    examples = subject.accepted()
    for example in examples[:1]:
        if all(tensor.numel() for _, _, tensor in _written(subject.schema, example)):
            others = _others(subject, examples[1:], example)["others"]
            yield Case(
                "several calls",
                example,
                probe=changes_what_it_declares,
                options={"others": others},
                shrink=False,
            )


def _others(subject: Subject, examples: list[Example], arranged: Example) -> dict[str, Any]:
    changes = [{size: size + 1} for size in sizes(arranged)[:2] if size]
    others = [
        *examples[:2],
        *(larger for _, larger in each_resized(arranged, *changes)),
        *(case.example for case in other_scalars(subject, arranged)),
        Example(*probes.other_values(tuple(arranged))),
        arranged.map(lambda t: _linear(t, factor=3, summand=1) if probes.is_plain(t) else t),
        arranged.map(_minus_twice),
    ]
    return {"others": [tuple(other) for other in others if subject.is_valid(other)]}
