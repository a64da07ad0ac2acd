"""Checks for side effects on the process, and checks of repeated and concurrent calls."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
import gc
import itertools
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torchop.testing import probes
from torchop.testing._check.calls import (
    Call,
    CannotCheck,
    ForkError,
    breaks_contract,
    filled_memory,
    reason,
    text_of,
)
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks.gradients import same_gradients, trainable_example
from torchop.testing._check.subject import Subject
from torchop.testing._check.variants import VARIANTS
from torchop.testing.process_state import (
    forks,
    generator_states,
    is_of_generator,
    process_state,
    seed_all,
)

# --------------------------------------------------------------------------------------------------
# Repeated calls


def _differ(actual: Any, expected: Any) -> bool:
    try:
        probes.assert_same(actual, expected, "", rtol=0, atol=0)
    except AssertionError:
        return True
    return False


def is_repeatable(call: Call, first: Any = None) -> None:
    """Check that calls with the same arguments return bitwise identical results.

    Compare the results with `first`, the outcome of the first call in the process. If `first` is
    None, compare them with one more call.
    """
    expected = call.again() if first is None else first
    end = time.perf_counter() + 0.2
    for number in range(2, 301):
        what = f"call {number} with the same arguments"
        try:
            again = call.again()
        except Exception as error:
            raise AssertionError(
                f"{what} raises {reason(error)}, but an equal call before it did not raise."
            ) from error
        probes.assert_same(again, expected, what, rtol=0, atol=0)
        if number > 5 and time.perf_counter() > end:
            break


def _drawn(call: Call, seed: int) -> list[Any]:
    args, kwargs = call.example.copy()
    seed_all(seed)
    return probes.leaves(call.op(*args, **kwargs))


def draws_from_its_generator(call: Call) -> None:
    """Check that an operator with a generator argument ignores PyTorch's default generator."""
    drawn = [_drawn(call, seed) for seed in (1, 2)]
    what = "with an equal generator, and another seed of PyTorch's default generator"
    try:
        probes.assert_same(drawn[1], drawn[0], what, rtol=0, atol=0)
    except AssertionError as error:
        raise AssertionError(f"{error} Draw from the generator that the caller passes.") from None


def draws_anew(call: Call) -> None:
    """Check that each call draws new random numbers instead of seeding a generator."""
    results = []
    for seed in range(16):
        seed_all(seed)
        before = generator_states()
        results.append(_drawn(call, seed))
        states = generator_states()
        if states != before:
            _drawn(call, seed + 1)
            for name, state in generator_states().items():
                if state == states[name] != before[name]:
                    raise AssertionError(
                        f"the call seeds {name}: its state after the call is the same for two "
                        "seeds before. Draw from a torch.Generator of the operator instead."
                    )
            return
        if _differ(results[-1], results[0]):
            return
    raise AssertionError(
        "the operator has the tag torch.Tag.nondeterministic_seeded, but 16 seeds give the same "
        "results, and no generator advances. Draw from PyTorch's generator, or from one that is "
        "seeded from it."
    )


def keeps_no_input(call: Call) -> None:
    """Check that the memory of the arguments can be released as soon as the call returns."""
    names = iter(call.names)
    watched = []

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        name, copy = next(names), tensor.detach().clone()
        if tensor.layout is torch.strided and tensor.numel():
            watched.append((name, StorageWeakRef(copy.untyped_storage())))
        return copy

    given = call.example.map(copied)
    with torch.no_grad():
        probes.outcome(call.op, *given)
    del given
    if not all(memory.expired() for _, memory in watched):
        gc.collect()
    alive = [name for name, memory in watched if not memory.expired()]
    if alive:
        raise AssertionError(f"the memory of {alive[0]} is not released after the call.")


# Common values of environment variables that turn a feature on or off. None unsets the variable.
_ENVIRONMENT = ("1", "0", "", "on", None)


def ignores_environment(call: Call) -> None:
    """Check that results do not depend on the environment variables that the kernel reads.

    Best effort: the check sees only variables that Python code reads from `os.environ` or with
    `os.getenv`.
    """
    read: list[str] = []
    lookup = type(os.environ).__getitem__

    def noticed(environment: Any, key: Any) -> Any:
        if environment is os.environ and key not in read:
            read.append(key)
        return lookup(environment, key)

    type(os.environ).__getitem__ = noticed  # type: ignore[method-assign]
    try:
        expected = call.again()
    finally:
        type(os.environ).__getitem__ = lookup  # type: ignore[method-assign]
    for name in read:
        before = os.environ.get(name)
        for value in _ENVIRONMENT:
            if value == before:
                continue
            _set_variable(name, value)
            try:
                actual = call.again()
            except Exception:  # the kernel rejects this value of the variable
                continue
            finally:
                _set_variable(name, before)
            try:
                probes.assert_same(actual, expected, f"if {name}={value!r}")
            except AssertionError as error:
                raise AssertionError(
                    f"the kernel reads the environment variable {name}. With {name} "
                    f"{'deleted' if value is None else f'set to {value!r}'}, {error} Compiled "
                    "programs and caches do not notice such a change. Make it an argument, or "
                    "read the variable when the module is imported."
                ) from None


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def leaves_process_alone(
    call: Call,
    draws: bool = False,
    raises: bool = False,
    gradients: bool = False,
    unusual: bool = False,
) -> None:
    """Check that the call changes no process state, such as default dtypes, modes and seeds.

    If `draws` is true, the call may advance PyTorch's random number generators. If `raises` is
    true, the operator rejects the arguments. If `gradients` is true, the backward pass runs too. If
    `unusual` is true, the call runs under modes that differ from the defaults, and may raise. This
    exposes a kernel that sets a mode and then resets it to the default instead of the previous
    value.
    """
    # Start from an unusual seed and number of threads. If the kernel sets either one, it almost
    # certainly chooses another value, so the change shows up.
    seed_all(20010)
    torch.set_num_threads(7)
    process, forked = os.getpid(), forks()
    if unusual:
        torch.set_default_dtype(torch.double)
    with torch.set_grad_enabled(not unusual), warnings.catch_warnings():
        # The filter suppresses warnings during the call. It also reveals a kernel that replaces the
        # list of warning filters, because the filter is then missing after the call.
        warnings.filterwarnings("ignore", ".*")
        example, before = call.example.copy(), process_state()
        with contextlib.suppress(Exception) if raises or unusual else contextlib.nullcontext():
            results = probes.tensors_of(probes.leaves(call.op(*example.args, **example.kwargs)))
            if gradients:
                inputs = [tensor for tensor in example.tensors if tensor.requires_grad]
                total = probes.weighted_sum([probes.dense(r) for r in results if r.requires_grad])
                torch.autograd.grad(total, inputs, allow_unused=True)
        if os.getpid() != process:
            os._exit(1)  # a child that the kernel forked must not continue here
        after = process_state()
    if forks() != forked:
        raise AssertionError(
            "the call forks the process. The child lacks PyTorch's threads, and continues the "
            "program if it returns from the call. Start a new process, or exit the child."
        )
    for name, value in before.items():
        if after[name] == value:
            continue
        if is_of_generator(name):
            if draws and "torch" in name:
                continue
            if draws:
                raise AssertionError(
                    f"the call changes {name}. Draw from PyTorch's generator, or from one that is "
                    "seeded from it, because torch.manual_seed does not seed other generators."
                )
            raise AssertionError(
                f"the call changes {name}. If the operator draws random numbers, add the tag "
                "torch.Tag.nondeterministic_seeded. An operator must not seed a global generator."
            )
        is_long = isinstance(value, list | dict)
        values = "" if is_long else f" from {value} to {after[name]}"
        when = "raising. Use try and finally" if raises else "returning"
        raise AssertionError(f"the call changes {name}{values}. Restore it before {when}.")


# --------------------------------------------------------------------------------------------------
# Each of these functions yields the cases of one check (the calls that it makes). Reports print the
# first line of the docstring as the question that the check answers.


def repeated(subject: Subject, details: Details) -> Iterator[Case]:
    """Do equal calls give equal results?"""
    for example in subject.accepted():
        yield Case("repeated calls", example, probe=is_repeatable)
        options = {"first": subject.first_calls[subject.place(example)].record.outcome}
        # The first call succeeded, so an equal call must not raise. By default, an exception counts
        # as a rejection of the arguments. With `calls=False`, it counts as a failure.
        yield Case(
            "the first call",
            example,
            None,
            "plain",
            is_repeatable,
            options,
            calls=False,
            shrink=False,
        )
        arguments = (*example.args, *example.kwargs.values())
        # Operators such as dropout draw no random numbers if the probability is 0 or 1.
        is_off = any(value in (0, 1) for value in arguments if type(value) in (int, float, bool))
        if any(isinstance(argument, torch.Generator) for argument in arguments):
            yield Case("two equal generators", example, probe=draws_from_its_generator)
        elif subject.is_random and not is_off and any(t.numel() for t in example.tensors):
            yield Case("other seeds", example, probe=draws_anew, shrink=False)


def kept(subject: Subject, details: Details) -> Iterator[Case]:
    """Is the memory of the arguments released after a call?"""
    for example in subject.accepted():
        if any(t.numel() for t in example.tensors):
            yield Case("the memory of the arguments", example, probe=keeps_no_input, shrink=False)


def process(subject: Subject, details: Details) -> Iterator[Case]:
    """Does a call leave defaults, modes, generators and the environment unchanged?"""
    options = {"draws": True} if subject.is_random else {}
    check = functools.partial(Case, probe=leaves_process_alone, options=options)
    if isinstance(subject.first_calls[0].record.error, ForkError):
        yield check("the example", subject.examples[0], calls=False, shrink=False)
    for example in subject.examples[:3]:
        yield check("the example", example)
        modes = {**options, "unusual": True}
        yield check("the example, with default dtype float64", example, options=modes)
    trainable = trainable_example(subject)
    if trainable is not None:
        of_backward = {**options, "gradients": True}
        probe = leaves_process_alone
        yield Case("the backward", trainable, None, "gradient", probe, of_backward, shrink=False)
    for case in _refused(subject):
        label, options = f"{case.label}, which raises", {**options, "raises": True}
        yield dataclasses.replace(
            case, label=label, probe=leaves_process_alone, options=options, calls=False
        )


def _refused(subject: Subject) -> Iterator[Case]:
    """Yield a few calls that the operator rejects, each with a different error message."""
    found: set[str] = set()
    for name in ("empty", "zero_dim", "dtypes", "longer"):
        with contextlib.suppress(CannotCheck):  # the variant does not apply
            for case in subject.cases(VARIANTS[name]):
                try:
                    error = subject.call(case).record.error
                except CannotCheck:  # `valid` rejects the call
                    continue
                is_refused = error is not None and not breaks_contract(error)
                if is_refused and text_of(error) not in found and len(found) < _MOST_REFUSED:
                    found.add(text_of(error))
                    yield case


_MOST_REFUSED = 3


def environment(subject: Subject, details: Details) -> Iterator[Case]:
    """Are results independent of the environment variables that a call reads?"""
    subject.needs_fixed_results()
    for example in subject.accepted(most=2):
        yield Case("environment variables", example, probe=ignores_environment)


# --------------------------------------------------------------------------------------------------
# Threads


def _run_once(call: Call, arguments: Any, expected: Any, what: str, tolerances: Any) -> None:
    args, kwargs = probes.copies(arguments)
    result = probes.leaves(call.op(*args, **kwargs))
    right = expected[: len(result)]  # drop the written arguments, which follow the results
    # Allow for rounding, because a concurrent call may change the number of OpenMP threads and
    # thereby the order of additions.
    probes.assert_same(result, right, what, **tolerances)


def _is_steady(call: Call, pairs: Sequence[tuple[Any, Any]], tolerances: Any) -> bool:
    """Return whether alternating calls in a single thread give their expected results."""
    try:
        for number in range(20):
            # In half of the calls, `torch.empty` returns NaN.
            with filled_memory() if number % 2 else contextlib.nullcontext():
                for arguments, expected in pairs:
                    _run_once(call, arguments, expected, "in one thread", tolerances)
    except Exception:
        return False
    return True


def runs_in_threads(call: Call, seconds: float = 8.0, **tolerances: Any) -> None:
    """Check that two threads that call the operator at the same time get correct results."""
    own = (tuple(call.example), call.again())
    pairs = [own, own]
    with contextlib.suppress(Exception):  # the operator refuses the other values
        others = tuple(call.other_values())
        pairs = [own, (others, call.again(others))]
    # With the other values, the kernel may read out of bounds and return arbitrary results. In this
    # case, pass the same values in both threads.
    if not _is_steady(call, pairs, tolerances):
        pairs = [own, own]
        if not _is_steady(call, pairs, tolerances):
            raise CannotCheck("equal calls give different results in one thread too")
    problems: list[BaseException] = []
    start = threading.Barrier(2)

    def run(arguments: Any, expected: Any) -> None:
        try:
            start.wait(seconds)
            end = time.perf_counter() + 0.1
            for number in itertools.count():
                if number >= 25 and time.perf_counter() > end:
                    break
                _run_once(call, arguments, expected, "in two threads", tolerances)
        except BaseException as error:
            problems.append(error)

    # The priority of providers (alternative kernels) is stored in a context variable, so run each
    # thread in a copy of the current context.
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(run, *pair), daemon=True)
        for pair in pairs
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the threads also switch within short kernels
    try:
        for thread in threads:
            thread.start()
        end = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(end - time.monotonic(), 0.0))
    finally:
        sys.setswitchinterval(interval)
    if any(thread.is_alive() for thread in threads):
        raise AssertionError(
            f"in two threads at once: a thread did not return within {seconds:g} s."
        )
    if problems:
        raise AssertionError(f"in two threads at once: {problems[0]!r}")


def threads(subject: Subject, details: Details) -> Iterator[Case]:
    """Do two threads that call the operator at the same time both get the right results?"""
    subject.needs_fixed_results()
    options: dict[str, Any] = subject.tolerances
    for example in subject.accepted(most=2):
        yield Case("two threads", example, probe=runs_in_threads, options=options, shrink=False)
    trainable = trainable_example(subject)
    if trainable is not None:
        options = {"ways": ["in another thread"]}
        yield Case("backward", trainable, None, "gradient", same_gradients, options)
