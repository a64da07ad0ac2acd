"""Checks of what results must not depend on: default dtype, denormals, locale, environment."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from torchop.testing import probes
from torchop.testing._check.kinds import Details, variants
from torchop.testing._check.subject import CannotCheck, Case, Subject
from torchop.testing.process_state import restored, set_decimal_comma

# Such a variable is left as it is, because a kernel may make what it names.
_ENDS_OF_PATHS = ("DIR", "PATH", "HOME", "FILE", "ROOT", "FOLDER", "CACHE")


def ignores_settings(
    op: Any, args: Any, kwargs: Any, kind: str, draws: bool = False, **tolerances: Any
) -> None:
    """The call does the same with other settings of a kind, such as another locale.

    What it `draws` may differ, because there are other numbers for each dtype in which they are
    drawn.
    """

    def call() -> Any:
        results = probes.outcome_of_copies(op, args, kwargs)
        return probes.mapped(results, torch.zeros_like) if draws else results

    expected = call()
    for words, change in _environments(call) if kind == "environment" else _CHANGES[kind]:
        try:
            with restored():
                change()
                actual = call()
        except Exception:
            if kind == "environment":
                continue  # a value that the operator refuses
            raise
        if kind == "default_dtype":
            tolerances = {"rtol": 0, "atol": 0}
        probes.assert_same(actual, expected, f"with {words}", **tolerances)


_Changes = Iterable[tuple[str, Callable[[], object]]]


def _flush_denormals() -> None:
    if not torch.set_flush_denormal(True):
        raise NotImplementedError("this processor cannot flush denormal numbers to zero")


def _environments(call: Callable[[], Any]) -> _Changes:
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
    for name in read:
        if name not in os.environ and not name.upper().endswith(_ENDS_OF_PATHS):
            for value in ("1", "0"):
                yield (
                    f"{name}={value} in the environment",
                    functools.partial(os.environ.__setitem__, name, value),
                )


# What is changed for each check, except for the environment, of which the call says what it reads.
_CHANGES: dict[str, _Changes] = {
    "default_dtype": [
        (f"the default dtype {dtype}", functools.partial(torch.set_default_dtype, dtype))
        for dtype in (torch.float64, torch.float16)
    ],
    "flush_denormal": [("torch.set_flush_denormal(True)", _flush_denormals)],
    "num_threads": [
        (f"torch.set_num_threads({number})", functools.partial(torch.set_num_threads, number))
        for number in (1, 5)
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


CHECKS = variants("contracts", _QUESTIONS, _cases)
