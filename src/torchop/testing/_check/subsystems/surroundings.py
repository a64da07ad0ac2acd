"""Checks of what a call may happen in: threads, autocast, modes, subclasses, copies, devices."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torchop._compat.handles import published_handle
from torchop._compat.pass_through import PassingMode, PassingTensor
from torchop._rules.user.sharding import SHARDING
from torchop.testing._check.kinds import CheckKind, Details
from torchop.testing._check.subject import CannotCheck, Case, Subject
from torchop.testing._check.subsystems.gradients import formula_problem
from torchop.testing._sharding import check_sharding
from torchop.testing.probes import (
    as_function,
    assert_same,
    copies,
    leaves,
    mapped,
    outcome,
    tensors_of,
    weighted_sum,
    with_tensors,
)

# --------------------------------------------------------------------------------------------------
# Probes


def runs_in_threads(op: Any, args: Any, kwargs: Any, seconds: float = 8.0) -> None:
    """Two threads that call at once get the same results as one, and return."""
    expected = outcome(op, *copies((args, kwargs)))
    problems: list[BaseException] = []
    start = threading.Barrier(2)

    def call() -> None:
        try:
            start.wait(seconds)
            for _ in range(25):
                call_args, call_kwargs = copies((args, kwargs))
                result = leaves(op(*call_args, **call_kwargs))
                assert_same(result, expected[: len(result)], "in two threads", rtol=0, atol=0)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(end - time.monotonic(), 0.0))
    if any(thread.is_alive() for thread in threads):
        raise AssertionError(f"a thread did not return from its calls within {seconds:g} s.")
    if problems:
        raise AssertionError(f"in two threads at once: {problems[0]!r}")


def runs_in_autocast(op: Any, args: Any, kwargs: Any) -> None:
    """Under autocast, the call does the same as without, or as on inputs that are cast."""
    tensors = tensors_of((args, kwargs))
    device = tensors[-1].device
    lower = torch.bfloat16 if device.type == "cpu" else torch.float16
    floats = [place for place, t in enumerate(tensors) if t.dtype.is_floating_point]
    some = [c for n in range(1, len(floats)) for c in itertools.combinations(floats[:4], n)]

    def cast(dtype: torch.dtype, places: Any) -> Any:
        copied = copies((args, kwargs))
        return with_tensors(
            copied,
            [t.to(dtype) if n in places else t for n, t in enumerate(tensors_of(copied))],
        )

    with torch.autocast(device.type, dtype=lower):
        actual = outcome(op, *copies((args, kwargs)))
    problem = None
    choices = [(lower, ()), (lower, floats), (torch.float32, floats)]
    for dtype, places in choices + [(lower, chosen) for chosen in some]:
        try:
            expected = outcome(op, *cast(dtype, places))
            assert_same(actual, expected, "under autocast")
        except Exception as error:
            problem = problem or error
        else:
            return
    raise AssertionError(
        f"neither that of the plain call nor that of a call on cast inputs: {problem}"
    )


def runs_in_inference_mode(op: Any, args: Any, kwargs: Any) -> None:
    """In inference mode, and with `no_grad`, the call does the same as elsewhere."""
    expected = outcome(op, *copies((args, kwargs)))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            actual = outcome(op, *copies((args, kwargs)))
            assert_same(actual, expected, f"in {mode.__name__}")


class PassingFunctionMode(TorchFunctionMode):
    """Passes every call of PyTorch on."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        return function(*args, **(kwargs or {}))


def runs_in_modes(op: Any, args: Any, kwargs: Any) -> None:
    """Modes that pass every call on change nothing."""
    expected = outcome(op, *copies((args, kwargs)))
    for mode in (PassingFunctionMode, PassingMode):
        with mode():
            actual = outcome(op, *copies((args, kwargs)))
        assert_same(actual, expected, f"in a {mode.__name__}")


class PassingFunctionTensor(torch.Tensor):
    """A subclass that changes nothing."""


def takes_subclasses(op: Any, args: Any, kwargs: Any) -> None:
    """Subclasses of Tensor that pass every call on change nothing."""
    with torch.no_grad():
        expected = outcome(op, *copies((args, kwargs)))
        plain = mapped(copies((args, kwargs)), lambda t: t.as_subclass(PassingFunctionTensor))
        actual = [_plain(result) for result in outcome(op, *plain)]
        assert_same(actual, expected, "with a subclass of Tensor")
        wrapped = mapped(copies((args, kwargs)), PassingTensor)
        actual = [_plain(result) for result in outcome(op, *wrapped)]
        assert_same(actual, expected, "with a subclass that wraps a Tensor")


def _plain(value: Any) -> Any:
    if isinstance(value, PassingTensor):
        return value.wrapped
    return value.as_subclass(torch.Tensor) if isinstance(value, torch.Tensor) else value


def copies_are_the_same(op: Any, args: Any, kwargs: Any) -> None:
    """Copies of the handle, deep and pickled, do the same as the operator."""
    handle: Any = published_handle(op._name.removesuffix(".default"))
    expected = outcome(op, *copies((args, kwargs)))
    for how, again in (
        ("deepcopy", copy.deepcopy(handle)),
        ("pickle", pickle.loads(pickle.dumps(handle))),
    ):
        actual = outcome(again._opoverload, *copies((args, kwargs)))
        assert_same(actual, expected, f"a copy of the handle made by {how}")


def is_deterministic(op: Any, args: Any, kwargs: Any) -> None:
    """Gradients of equal calls are the same, bit for bit."""
    function, inputs = as_function(op, args, kwargs)
    first = torch.autograd.grad(weighted_sum(function(*inputs)), inputs, allow_unused=True)
    for _ in range(4):
        again = torch.autograd.grad(weighted_sum(function(*inputs)), inputs, allow_unused=True)
        assert_same(again, first, "gradients of equal calls", rtol=0, atol=0)


def runs_on_cuda(op: Any, args: Any, kwargs: Any) -> None:
    """On the GPU, the call does the same as on the CPU."""
    expected = outcome(op, *copies((args, kwargs)))
    moved = mapped((args, kwargs), lambda tensor: tensor.cuda())
    actual = [r.cpu() if isinstance(r, torch.Tensor) else r for r in outcome(op, *moved)]
    assert_same(actual, expected, "on CUDA")


def shards_the_same(op: Any, args: Any, kwargs: Any) -> None:
    """A call on DTensors, with every placement on two ranks, gives the same as on whole tensors."""
    check_sharding(op, args, kwargs, limit=60)


# --------------------------------------------------------------------------------------------------
# Cases


def _simple(probe: Any, subject: Subject, details: Details) -> Iterator[Case]:
    """The probe on each example."""
    for example in subject.accepted():
        yield Case("the example", probe, example)


def _not_random(probe: Any, subject: Subject, details: Details) -> Iterator[Case]:
    if subject.is_random:
        raise CannotCheck("its results are random")
    yield from _simple(probe, subject, details)


def _threads(subject: Subject, details: Details) -> Iterator[Case]:
    if subject.is_random:
        raise CannotCheck("its results are random")
    for example in subject.accepted(most=2):
        yield Case("two threads", runs_in_threads, example, shrink=False)


def _autocast(subject: Subject, details: Details) -> Iterator[Case]:
    for example in subject.accepted():
        if any(t.dtype is torch.float32 for t in example.tensors):
            yield Case("torch.autocast", runs_in_autocast, example)


def _copies(subject: Subject, details: Details) -> Iterator[Case]:
    if subject.definition is None:
        raise CannotCheck("there is no handle of torchop, which has to outlive copies")
    for example in subject.accepted(most=1):
        yield Case("copies of the handle", copies_are_the_same, example)


def _deterministic(subject: Subject, details: Details) -> Iterator[Case]:
    problem = formula_problem(subject)
    if problem is not None:
        raise CannotCheck(f"no autograd formula that runs: {problem}")
    for example in subject.double_examples:
        yield Case("gradients of equal calls", is_deterministic, example)


def _cuda(subject: Subject, details: Details) -> Iterator[Case]:
    if not torch.cuda.is_available():
        raise CannotCheck("there is no CUDA device here")
    if not subject.has_kernel("CUDA", "CompositeExplicitAutograd"):
        raise CannotCheck("no CUDA kernel")
    yield from _not_random(runs_on_cuda, subject, details)


def _sharding(subject: Subject, details: Details) -> Iterator[Case]:
    if not SHARDING.has(subject.op):
        raise CannotCheck("no sharding rule of torchop")
    for example in subject.accepted(most=2):
        if example.tensors:
            yield Case("DTensors on two ranks", shards_the_same, example, shrink=False)


CHECKS = (
    CheckKind(
        "subsystems.threads",
        "Do two threads that call at once get the same results, and return?",
        _threads,
    ),
    CheckKind(
        "subsystems.autocast",
        "Is a call under autocast the plain call, or one on cast inputs?",
        _autocast,
    ),
    CheckKind(
        "subsystems.inference_mode",
        "Does it do the same in inference mode?",
        functools.partial(_simple, runs_in_inference_mode),
    ),
    CheckKind(
        "subsystems.modes",
        "Do modes that pass every call on change nothing?",
        functools.partial(_simple, runs_in_modes),
    ),
    CheckKind(
        "subsystems.subclasses",
        "Do subclasses of Tensor that pass every call on change nothing?",
        functools.partial(_simple, takes_subclasses),
    ),
    CheckKind(
        "subsystems.copies", "Do copies of the handle, deep or pickled, do the same?", _copies
    ),
    CheckKind(
        "subsystems.determinism", "Are gradients of equal calls equal, bit for bit?", _deterministic
    ),
    CheckKind(
        "subsystems.sharding",
        "Is a call on DTensors, in every placement, the call on whole tensors?",
        _sharding,
    ),
    CheckKind("subsystems.cuda", "Does it do the same on CUDA as on the CPU?", _cuda),
)
