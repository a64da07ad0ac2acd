"""Checks of what results must not depend on: default dtype, denormals, locale, environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from torchop._inspect.authored import authored_functions
from torchop.extend import Operator
from torchop.testing import probes
from torchop.testing._check.kinds import Details, variants
from torchop.testing._check.larger import repeated_results
from torchop.testing._check.subject import CannotCheck, Case, Subject
from torchop.testing._check.variants import each_resized, larger_sizes, sizes_changed
from torchop.testing.process_state import restored, set_decimal_comma

# Such a variable is left as it is, because a kernel may make what it names.
_ENDS_OF_PATHS = ("DIR", "PATH", "HOME", "FILE", "ROOT", "FOLDER", "CACHE")

# PyTorch starts a thread for each 32,768 elements.
_FOR_THREE_THREADS, _SIZES_FOR_THREADS = 2**16, (16385, 65537)


def ignores_settings(
    op: Any,
    args: Any,
    kwargs: Any,
    kind: str,
    draws: bool = False,
    is_large: bool = False,
    **tolerances: Any,
) -> None:
    """The call does the same with other settings of a kind, such as another locale.

    What it `draws` may differ, because there are other numbers for each dtype in which they are
    drawn. What `is_large` may be added up in another order, and of equal elements, another one may
    be chosen.
    """

    def call() -> Any:
        def told(tensor: torch.Tensor) -> torch.Tensor:
            differs = draws or (is_large and not tensor.is_floating_point())
            return torch.zeros_like(tensor) if differs else tensor

        return probes.mapped(probes.outcome_of_copies(op, args, kwargs), told)

    expected = call()
    if is_large:
        tolerances = {**probes.rounding(torch.float16, expected), **tolerances}
    for words, change in _environments(op, call) if kind == "environment" else _CHANGES[kind]:
        try:
            with restored(), change() or nullcontext():
                actual = call()
        except Exception:
            if kind == "environment":
                continue  # a value that the operator refuses
            raise
        if kind == "default_dtype":
            tolerances = {"rtol": 0, "atol": 0}
        probes.assert_same(actual, expected, f"with {words}", **tolerances)


# In words, and the function that makes the change, or returns a block in which it is made.
_Changes = Iterable[tuple[str, Callable[[], AbstractContextManager[None] | None]]]


def _flush_denormals() -> None:
    if not torch.set_flush_denormal(True):
        raise NotImplementedError("this processor cannot flush denormal numbers to zero")


def _environments(op: Any, call: Callable[[], Any]) -> _Changes:
    """Without any variable, which C may read, and with other values of those that Python reads."""
    read: dict[str, None] = {}
    environment: Any = type(os.environ)
    get = environment.__getitem__

    def reading(variables: Any, name: str) -> Any:
        read.setdefault(name)
        return get(variables, name)

    with mock.patch.object(environment, "__getitem__", reading):
        call()
    yield "an empty environment", os.environ.clear
    words = "another PYTHONHASHSEED, of which each process has its own"
    yield words, functools.partial(_hashing_anew, op)
    for name in read:
        if name not in os.environ and not name.upper().endswith(_ENDS_OF_PATHS):
            for value in ("1", "0"):
                yield (
                    f"{name}={value} in the environment",
                    functools.partial(os.environ.__setitem__, name, value),
                )


@contextmanager
def _hashing_anew(op: Any) -> Iterator[None]:
    """A block in which `hash` of a text is another number in the files of the operator."""

    def another_hash(value: Any) -> int:
        return hash(("another", value)) if isinstance(value, str | bytes) else hash(value)

    functions = authored_functions(Operator(op, "check"))
    with ExitStack() as stack:
        for namespace in {id(f.__globals__): f.__globals__ for f in functions}.values():
            stack.enter_context(mock.patch.dict(namespace, {"hash": another_hash}))
        yield


# What is changed for each check, except for the environment, of which the call says what it reads.
_CHANGES: dict[str, _Changes] = {
    "default_dtype": [
        (f"the default dtype {dtype}", functools.partial(torch.set_default_dtype, dtype))
        for dtype in (torch.float64, torch.float16)
    ],
    "flush_denormal": [("torch.set_flush_denormal(True)", _flush_denormals)],
    "num_threads": [
        (f"torch.set_num_threads({number})", functools.partial(torch.set_num_threads, number))
        for number in (1, 2, 3, 5)
    ],
    "locale": [("a locale whose decimal point is a comma", set_decimal_comma)],
}
_QUESTIONS = {
    "default_dtype": "Does a call do the same whatever the default dtype is?",
    "flush_denormal": "Does it do the same where the processor takes denormal numbers for zero?",
    "num_threads": "Does it do the same with any number of threads?",
    "locale": "Does it do the same whatever the locale is?",
    "environment": "Does it do the same whatever the environment is?",
}


def _cases(kind: str, subject: Subject, details: Details) -> Iterator[Case]:
    for example in subject.accepted(most=1):
        is_float = any(t.is_floating_point() or t.is_complex() for t in example.tensors)
        if kind in ("default_dtype", "flush_denormal") and not is_float:
            # As of PyTorch's own operators: half of an integer is of the default dtype.
            raise CannotCheck("no argument has a dtype that results in floating point could have")
        options = {"kind": kind, "draws": subject.is_random, **subject.tolerances}
        yield Case("the example", ignores_settings, example, options=options)
        if kind == "num_threads":
            results = probes.tensors_of(subject.first_results(example))
            changes = larger_sizes(example, _SIZES_FOR_THREADS, results)
            for change, larger in each_resized(example, *changes, subject=subject):
                most = max(tensor.numel() for tensor in larger.tensors)
                # With sizes that do not fit, a kernel in C++ may read what lies beyond.
                if most > _FOR_THREE_THREADS and repeated_results(subject, example, *change):
                    options = {**options, "is_large": True}
                    yield Case(sizes_changed(change), ignores_settings, larger, options=options)
                    break


CHECKS = variants("contracts", _QUESTIONS, _cases)
