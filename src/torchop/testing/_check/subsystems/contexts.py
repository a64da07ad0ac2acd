"""Checks of what a call may happen in: threads, autocast, modes, subclasses, copies."""

from __future__ import annotations

import contextvars
import copy
import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch
from torch.overrides import BaseTorchFunctionMode

from torchop._compat.classes import BaseTorchDispatchMode
from torchop._compat.optests import PassingTensor
from torchop._compat.registries import published_handle
from torchop._rules.user.sharding import SHARDING
from torchop.testing import probes
from torchop.testing._check.compilable import strided
from torchop.testing._check.kinds import Details, family
from torchop.testing._check.subject import CannotCheck, Case, Subject
from torchop.testing._check.subsystems.gradients import needs_formula, trainable_example
from torchop.testing._sharding import check_sharding

# --------------------------------------------------------------------------------------------------
# Probes


def runs_in_threads(
    op: Any, args: Any, kwargs: Any, seconds: float = 8.0, **tolerances: Any
) -> None:
    """Two threads that call at once, with other values, get the same results as one, and return."""
    calls = [(args, kwargs), probes.other_values((args, kwargs))]
    try:
        pairs = [(call, probes.outcome_of_copies(op, *call)) for call in calls]
    except Exception:  # it refuses the other values
        pairs = [(calls[0], probes.outcome_of_copies(op, args, kwargs))] * 2
    problems: list[BaseException] = []
    start = threading.Barrier(2)

    def call(arguments: Any, expected: Any) -> None:
        try:
            start.wait(seconds)
            for _ in range(25):
                call_args, call_kwargs = probes.copies(arguments)
                result = probes.leaves(op(*call_args, **call_kwargs))
                right = expected[: len(result)]  # without what is written
                # Not to the bit: a thread that is busy leaves OpenMP fewer of them.
                probes.assert_same(result, right, "in two threads", **tolerances)
        except BaseException as error:
            problems.append(error)

    # In the caller's context, which says whose kernel runs.
    threads = [
        threading.Thread(target=contextvars.copy_context().run, args=(call, *pair), daemon=True)
        for pair in pairs
    ]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in threads):
        raise AssertionError(f"a thread did not return from its calls within {seconds:g} s.")
    if problems:
        raise AssertionError(f"in two threads at once: {problems[0]!r}")


def differentiates_in_another_thread(op: Any, args: Any, kwargs: Any, seconds: float = 8.0) -> None:
    """A backward in another thread than that of the call returns the same gradients."""
    what = "backward in another thread than that of the call"
    function, inputs = probes.as_function(op, args, kwargs)
    expected = probes.gradients(function, inputs)
    total = probes.weighted_sum(function(*inputs))
    answer: Future[Any] = Future()

    def differentiate() -> None:
        try:
            answer.set_result(torch.autograd.grad(total, inputs, allow_unused=True))
        except BaseException as error:
            answer.set_exception(error)

    run = contextvars.copy_context().run
    threading.Thread(target=run, args=(differentiate,), daemon=True).start()
    try:
        actual = answer.result(seconds)
    except TimeoutError:
        raise AssertionError(f"{what} did not return within {seconds:g} s.") from None
    probes.assert_same(actual, expected, what)


def runs_in_autocast(op: Any, args: Any, kwargs: Any) -> None:
    """Under autocast, the call does the same as without, or as on inputs that are cast."""
    tensors = probes.tensors_of((args, kwargs))
    device = tensors[-1].device
    lower = torch.get_autocast_dtype(device.type)
    floats = [place for place, t in enumerate(tensors) if t.dtype.is_floating_point]
    some = [c for n in range(1, len(floats)) for c in itertools.combinations(floats[:4], n)]

    def cast(dtype: torch.dtype, places: Any) -> Any:
        copied = probes.copies((args, kwargs))
        return probes.with_tensors(
            copied,
            [t.to(dtype) if n in places else t for n, t in enumerate(probes.tensors_of(copied))],
        )

    with torch.autocast(device.type, dtype=lower):
        actual = probes.outcome_of_copies(op, args, kwargs)
    problem = None
    choices: list[Any] = [(lower, ()), (lower, floats), (torch.float32, floats)]
    ways: list[Any] = [(*each, {}) for each in choices + [(lower, chosen) for chosen in some]]
    # A kernel of several calls of PyTorch may round between them, as each is cast for itself.
    ways += [(*each, probes.rounding(lower, actual)) for each in choices]
    for dtype, places, tolerances in ways:
        try:
            expected = probes.outcome(op, *cast(dtype, places))
            probes.assert_same(actual, expected, "under autocast", **tolerances)
        except Exception as error:
            problem = problem or error
        else:
            return
    raise AssertionError(
        f"neither that of the plain call nor that of a call on cast inputs: {problem}"
    )


def runs_in_inference_mode(op: Any, args: Any, kwargs: Any) -> None:
    """In inference mode, and with `no_grad`, the call does the same as elsewhere."""
    expected = probes.outcome_of_copies(op, args, kwargs)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            actual = probes.outcome_of_copies(op, args, kwargs)
            probes.assert_same(actual, expected, f"in {mode.__name__}")


def runs_in_modes(op: Any, args: Any, kwargs: Any) -> None:
    """Modes that pass every call on change nothing."""
    expected = probes.outcome_of_copies(op, args, kwargs)
    for mode in (BaseTorchFunctionMode, BaseTorchDispatchMode):
        with mode():
            actual = probes.outcome_of_copies(op, args, kwargs)
        probes.assert_same(actual, expected, f"in a {mode.__name__}")


def takes_subclasses(op: Any, args: Any, kwargs: Any) -> None:
    """Subclasses of Tensor that pass every call on change nothing."""

    class PassingFunctionTensor(torch.Tensor):
        """A subclass that changes nothing."""

    with torch.no_grad():
        expected = probes.outcome_of_copies(op, args, kwargs)
        plain = probes.mapped(
            probes.copies((args, kwargs)), lambda t: t.as_subclass(PassingFunctionTensor)
        )
        actual = probes.mapped(probes.outcome(op, *plain), lambda t: t.as_subclass(torch.Tensor))
        probes.assert_same(actual, expected, "with a subclass of Tensor")
        wrapped = probes.mapped(probes.copies((args, kwargs)), PassingTensor)
        actual = probes.mapped(probes.outcome(op, *wrapped), lambda t: getattr(t, "wrapped", t))
        probes.assert_same(actual, expected, "with a subclass that wraps a Tensor")


def copies_are_the_same(op: Any, args: Any, kwargs: Any) -> None:
    """Copies of the handle, deep and pickled, do the same as the operator."""
    handle: Any = published_handle(op._name.removesuffix(".default"))
    expected = probes.outcome_of_copies(op, args, kwargs)
    for how, again in (
        ("deepcopy", copy.deepcopy(handle)),
        ("pickle", pickle.loads(pickle.dumps(handle))),
    ):
        actual = probes.outcome(again._opoverload, *probes.copies((args, kwargs)))
        probes.assert_same(actual, expected, f"a copy of the handle made by {how}")


def is_deterministic(op: Any, args: Any, kwargs: Any) -> None:
    """Gradients of equal calls are the same, bit for bit."""
    function, inputs = probes.as_function(op, args, kwargs)
    first = probes.gradients(function, inputs)
    for _ in range(4):
        again = probes.gradients(function, inputs)
        probes.assert_same(again, first, "gradients of equal calls", rtol=0, atol=0)


# --------------------------------------------------------------------------------------------------
# Cases


def threads(subject: Subject, details: Details) -> Iterator[Case]:
    """Do two threads that call at once get the same results, and return?"""
    subject.needs_fixed_results()
    for example in subject.accepted(most=2):
        options = subject.tolerances
        yield Case("two threads", runs_in_threads, example, options=options, shrink=False)
    trainable = trainable_example(subject)
    if trainable is not None:
        yield Case("backward in another thread", differentiates_in_another_thread, trainable)


def autocast(subject: Subject, details: Details) -> Iterator[Case]:
    """Is a call under autocast the plain call, or one on cast inputs?"""
    for example in subject.accepted():
        if any(t.dtype is torch.float32 for t in example.tensors):
            yield Case("torch.autocast", runs_in_autocast, example)


def inference_mode(subject: Subject, details: Details) -> Iterator[Case]:
    """Does it do the same in inference mode?"""
    for example in subject.accepted():
        yield Case("the example", runs_in_inference_mode, example)


def modes(subject: Subject, details: Details) -> Iterator[Case]:
    """Do modes that pass every call on change nothing?"""
    for example in subject.accepted():
        yield Case("the example", runs_in_modes, example)


def subclasses(subject: Subject, details: Details) -> Iterator[Case]:
    """Do subclasses of Tensor that pass every call on change nothing?"""
    why = "PyTorch makes no subclass of a sparse tensor: torch.Tensor.as_subclass refuses it"
    for example in strided(subject, details, why).accepted():
        yield Case("the example", takes_subclasses, example)


def copies(subject: Subject, details: Details) -> Iterator[Case]:
    """Do copies of the handle, deep or pickled, do the same?"""
    if subject.operator.handle is None:
        raise CannotCheck("the operator has no handle of torchop, of which copies could be made")
    for example in subject.accepted(most=1):
        yield Case("copies of the handle", copies_are_the_same, example)


def determinism(subject: Subject, details: Details) -> Iterator[Case]:
    """Are gradients of equal calls equal, bit for bit?"""
    needs_formula(subject)
    for example in subject.trainable_examples:
        yield Case("gradients of equal calls", is_deterministic, example)


def sharding(subject: Subject, details: Details) -> Iterator[Case]:
    """Is a call on DTensors, in every placement, the call on whole tensors?"""
    if not SHARDING.has(subject.op):
        raise CannotCheck("no sharding rule of torchop")
    options = {"limit": 60}
    for example in subject.accepted(most=2):
        if example.tensors:
            label = "DTensors on two ranks"
            yield Case(label, check_sharding, example, options=options, shrink=False)


CHECKS = (
    *family("subsystems", threads, autocast, inference_mode, modes, subclasses),
    *family("subsystems", copies, determinism, sharding),
)
