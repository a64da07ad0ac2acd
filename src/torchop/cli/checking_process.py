"""Checking each operator in a process of its own, so that a crash is a finding."""

from __future__ import annotations

import dataclasses
import importlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from torchop import MissingRuleError
from torchop._accelerate import patterns
from torchop._compat import compilers
from torchop._errors import short_text
from torchop._schema import naming
from torchop.cli.child_process import ChildError, answers, first_line, preload
from torchop.testing import CheckReport, Result
from torchop.testing._check import program
from torchop.testing._check.kinds import Details
from torchop.testing._check.run import (
    Check,
    Expectation,
    as_expected,
    expected_for,
    plan_checks,
)
from torchop.testing._check.session import call_costs, run_within, unmet
from torchop.testing._check.subject import Case, Subject

_TAIL = 2**16  # bytes of the output of a child, of which a message shows a part


class Request(NamedTuple):
    """How operators are checked, for the process that does it."""

    modules: tuple[str, ...]  # what it imports
    examples: str | None = None  # "module:name" of examples by operator
    expected: str | None = None  # "module:name" of the failures that are known
    only: tuple[str, ...] | None = None
    seed: int = 0
    timeout: float = 300.0  # seconds for one check
    budget: float | None = None  # seconds for all checks of one operator


class NotCheckedError(click.ClickException):
    """Why an operator cannot be checked, which is not the caller's mistake."""


# Called with the number of checks that are done, the number of all, and the name of the next.
Progress = Callable[[int, int, str], None]


def prepare(request: Request) -> None:
    """Has the processes that are started from now on import the modules once for all.

    So it is with Dynamo, which many checks need, and which takes a second.
    """
    preload([__name__, compilers.DYNAMO, *request.modules])


def check_operator(op: str, request: Request, progress: Progress) -> CheckReport:
    """Checks an operator; a check that ends its process has failed, and the others go on.

    Raises:
        NotCheckedError: there are no examples of a call, or its process cannot be started.
        click.ClickException: a module cannot be imported, or there is no such check.
    """
    started_at = time.perf_counter()
    schema, expected, costs = op, dict[str, Expectation | None](), dict[str, float]()
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="torchop-") as name:
        folder, current = Path(name), ""
        while True:
            spent = time.perf_counter() - started_at
            args = op, request, tuple(results), spent, folder
            output = folder / "output"
            try:
                with answers(
                    "forkserver", _messages, args, request.timeout, request.modules, output
                ) as messages:
                    for kind, value in messages:
                        match kind:
                            case "planned":
                                expected, schema = value
                            case "check":
                                current = value
                                progress(len(results), len(expected), current)
                            case "result":
                                results[current], current = value, ""
                            case "costs":
                                costs = value
                break
            except ChildError as error:
                if not expected:
                    raise NotCheckedError(f"{op}: {error}") from None
                if not current:
                    break  # all checks are done
                crash = _crash(current, error.problem, folder)
                results[current], current = as_expected(crash, expected[current]), ""
    checked = [results[name] for name in expected if name in results]
    checked += unmet(expected, checked)
    seconds = time.perf_counter() - started_at
    return CheckReport(op, schema, tuple(checked), request.seed, seconds, costs)


def _crash(check: str, problem: str, folder: Path) -> Result:
    """What is told of a check that ended its process: the call, what it wrote, where it crashed."""
    label, _, text = (folder / "case").read_text(encoding="utf-8").partition("\n")
    with open(folder / "output", "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        printed = file.read().decode(errors="replace")
    printed, crash, traceback = printed.partition("Fatal Python error: ")
    wrote = short_text(f"...{printed[-200:]}" if len(printed) > 200 else printed).strip()
    if crash:
        innermost = [line.strip() for line in traceback.splitlines() if "File " in line][:3]
        wrote = " ".join([wrote, traceback.partition("\n")[0], *innermost]).strip()
    message = f"{label or 'before the first call'}: it {problem}."
    return Result(check, "failed", f"{message} It wrote: {wrote}" if wrote else message, text)


# --------------------------------------------------------------------------------------------------
# In the child


def _messages(
    op: str, request: Request, done: tuple[str, ...], spent: float, folder: Path
) -> Iterator[tuple[str, Any]]:
    """Yields messages for the parent process, each as soon as possible.

    Args:
        done: the checks that need not be run again.
        spent: the seconds of the budget that are spent.
        folder: where the call is written that is tried, for the case that it ends the process.
    """
    examples: tuple[Any, ...] = ()
    expected: Mapping[str, str] | None = None
    try:
        option = f"--examples {request.examples}"
        if request.examples is not None:
            by_pattern = _mapping(request.examples, "operators to examples")
            examples = tuple(patterns.value_for(naming.parse(op), by_pattern) or ())
        option = f"--expected {request.expected}"
        if request.expected is not None:
            expected = expected_for(op, _mapping(request.expected, "checks to reasons"))
    except Exception as error:
        raise click.ClickException(f"{option}: {first_line(error)}") from None
    try:
        checks = plan_checks(op, examples, seed=request.seed, only=request.only, expected=expected)
    except MissingRuleError:
        raise NotCheckedError(f"{op} has no examples") from None
    except Exception as error:
        raise click.ClickException(str(error)) from None
    yield "planned", ({c.name: c.expected for c in checks}, str(checks[0].subject.schema))
    end = None if request.budget is None else time.perf_counter() + request.budget - spent
    for check in checks:
        if check.name not in done:
            yield "check", check.name
            yield "result", run_within(_written(check, folder), end, request.budget)
    yield "costs", call_costs(checks[0].subject)


def _mapping(place: str, what: str) -> Mapping[str, Any]:
    """A mapping in a module, or that a function there returns: "module:name"."""
    module, separator, attribute = place.partition(":")
    if not separator:
        raise ValueError("write module:name, such as tests.examples:EXAMPLES")
    value = getattr(importlib.import_module(module), attribute)
    mapping = value() if callable(value) else value
    if not isinstance(mapping, Mapping):
        raise TypeError(f"it is no mapping of {what}: {type(mapping).__name__}")
    return mapping


def _written(check: Check, folder: Path) -> Check:
    """The check; before each of its cases is tried, its label and its program are in a file."""
    file = folder / "case"

    def cases(subject: Subject, details: Details) -> Iterator[Case]:
        file.write_text("", encoding="utf-8")
        for case in check.kind.cases(subject, details):
            try:
                example, options = case.arguments()
                comment = f"{check.name} of {subject}: {case.label}"
                text = program.write(subject.op, case.probe, *example, options, comment)
            except Exception:  # what cannot be written is tried all the same
                text = ""
            file.write_text(f"{case.label}\n{text}", encoding="utf-8", errors="replace")
            os.truncate(folder / "output", 0)  # what is told of a crash is of this call
            yield case

    return dataclasses.replace(check, kind=check.kind._replace(cases=cases))
