"""Checking each operator in a process of its own, so that a crash is a finding."""

from __future__ import annotations

import dataclasses
import importlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchop._accelerate import patterns
from torchop._compat import compilers
from torchop._errors import MissingRuleError, short_text
from torchop._schema import naming
from torchop.cli import child_process
from torchop.cli.child_process import START_LIMIT, Child, ChildError, preload
from torchop.cli.measure import first_line
from torchop.testing._check import program
from torchop.testing._check.report import CheckReport, Result
from torchop.testing._check.run import (
    Check,
    Expectation,
    as_expected,
    expected_for,
    plan_checks,
    run_check,
)
from torchop.testing._check.session import call_costs, run_within, unmet
from torchop.testing._check.subject import Case


class Request(NamedTuple):
    """How operators are checked, for the process that does it."""

    modules: tuple[str, ...]  # what it imports
    examples: str | None = None  # "module:name" of examples by operator
    expected: str | None = None  # "module:name" of the failures that are known
    only: tuple[str, ...] | None = None
    seed: int = 0
    timeout: float = 300.0  # seconds for one check
    budget: float | None = None  # seconds for all checks of one operator


class NotCheckedError(Exception):
    """Why an operator cannot be checked at all; `is_usage` if that is the caller's mistake."""

    def __init__(self, problem: str, is_usage: bool) -> None:
        super().__init__(problem)
        self.is_usage = is_usage


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
        NotCheckedError: there are no examples of a call, or there is no such check.
    """
    started_at = time.perf_counter()
    results: dict[str, Result] = {}
    while True:
        session = _Session(op, request, tuple(results), spent=time.perf_counter() - started_at)
        session.run(results, progress)
        if session.crash is None:
            break
        name = session.current
        results[name] = as_expected(_again(op, request, session), session.expected[name])
    checked = [results[name] for name in session.expected if name in results]
    checked += unmet(session.expected, checked)
    seconds = time.perf_counter() - started_at
    return CheckReport(op, session.schema, tuple(checked), request.seed, seconds, session.costs)


class _Session:
    """What a child process has reported about one operator."""

    def __init__(
        self,
        op: str,
        request: Request,
        done: tuple[str, ...] = (),
        traced: str | None = None,
        spent: float = 0.0,
    ) -> None:
        self.op, self.request = op, request
        self.args = op, request, done, traced, spent
        self.expected: dict[str, Expectation | None] = {}  # by the name of each check
        self.schema, self.current = op, ""
        self.costs: Mapping[str, float] = {}
        self.crash: ChildError | None = None
        self.case: tuple[str, str] | None = None  # the latest, if it is traced: label and program
        self.output = ""

    def run(self, results: dict[str, Result], progress: Progress) -> None:
        """Runs the checks that are left, up to one that ends the process."""
        with tempfile.TemporaryDirectory(prefix="torchop-") as folder:
            output = Path(folder, "output")
            try:
                with Child("forkserver", _messages, self.args, output) as child:
                    self._receive(child, results, progress)
            except ChildError as error:
                self.crash = error if self.current else None
                if not self.expected:
                    problem = f"importing what registers it {error}"
                    raise NotCheckedError(f"{self.op}: {problem}", is_usage=False) from None
            except OSError as error:
                problem = f"no process can be started for it ({first_line(error)})"
                raise NotCheckedError(f"{self.op}: {problem}", is_usage=False) from None
            if self.crash is not None:
                self.output = child_process.tail(output)

    def _receive(self, child: Child, results: dict[str, Result], progress: Progress) -> None:
        limit = START_LIMIT
        while True:
            kind, *values = child.receive(limit)
            limit = self.request.timeout
            match kind:
                case "refused":
                    raise NotCheckedError(*values)
                case "planned":
                    self.expected, self.schema = values
                case "check":
                    (self.current,) = values
                    progress(len(results), len(self.expected), self.current)
                case "case":
                    label, text = values
                    self.case = label, text
                case "result":
                    results[self.current] = values[0]
                    self.current = ""
                case "done":
                    (self.costs,) = values
                    return


def _again(op: str, request: Request, crashed: _Session) -> Result:
    """Runs a check that ended its process once more, to find the call that does it."""
    check, error = crashed.current, crashed.crash
    session = _Session(op, request, traced=check)
    results: dict[str, Result] = {}
    session.run(results, lambda done, total, name: None)
    if check in results:
        message = f"it {error}; when it was run again, it did not, and {results[check].outcome}"
        return dataclasses.replace(results[check], outcome="failed", message=message)
    label, text = session.case or ("before the first call", "")
    message = f"{label}: it {session.crash}.{_tail(session.output)}"
    return Result(check, "failed", message, text)


def _tail(output: str) -> str:
    """The end of what a process wrote, and where it crashed, for a message."""
    printed, crash, traceback = output.partition("Fatal Python error: ")
    text = short_text(f"...{printed[-200:]}" if len(printed) > 200 else printed).strip()
    if crash:
        innermost = [line.strip() for line in traceback.splitlines() if "File " in line][:3]
        text = " ".join([text, traceback.partition("\n")[0], *innermost]).strip()
    return f" It wrote: {text}" if text else ""


# --------------------------------------------------------------------------------------------------
# In the child


def _messages(
    op: str, request: Request, done: tuple[str, ...], traced: str | None, spent: float
) -> Iterator[tuple[Any, ...]]:
    """Yields messages for the parent process, each as soon as possible.

    Args:
        done: the checks that need not be run again.
        traced: the only check to run, of which each call is told before it is made.
        spent: the seconds of the budget that are spent.
    """
    for module in request.modules:
        try:
            importlib.import_module(module)
        except Exception as error:
            yield "refused", f"{module} cannot be imported: {first_line(error)}", True
            return
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
        yield "refused", f"{option}: {first_line(error)}", True
        return
    try:
        checks = plan_checks(op, examples, seed=request.seed, only=request.only, expected=expected)
    except MissingRuleError:
        yield "refused", f"{op} has no examples", False
        return
    except Exception as error:
        yield "refused", str(error), True
        return
    yield "planned", {c.name: c.expected for c in checks}, str(checks[0].subject.schema)
    end = None if request.budget is None else time.perf_counter() + request.budget - spent
    for check in checks:
        if check.name in done or traced not in (None, check.name):
            continue
        yield "check", check.name
        if traced is None:
            yield "result", run_within(check, end, request.budget)
        else:
            yield from _traced(check)
    yield "done", call_costs(checks[0].subject) if traced is None else {}


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


def _traced(check: Check) -> Iterator[tuple[Any, ...]]:
    """Yields each case of a check as a program before it is tried, and the result."""
    cases = check.kind.cases(check.subject, {})
    try:
        for case in cases:
            try:
                example, options = case.arguments()
                text = program.write(
                    check.subject.op,
                    case.probe,
                    example.args,
                    example.kwargs,
                    options,
                    f"{check.name} of {check.subject}: {case.label}",
                )
            except Exception:  # what cannot be written is tried all the same
                text = ""
            yield "case", case.label, text
            result = run_check(_only_of(check, case))
            if result.outcome == "failed":
                yield "result", result
                return
    except Exception as error:  # such as that there is nothing to try
        yield "result", Result(check.name, "cannot be done", str(error))
        return
    yield "result", Result(check.name, "passed", question=check.question)


def _only_of(check: Check, case: Case) -> Check:
    """A check of one case."""
    kind = check.kind._replace(cases=lambda subject, details: iter((case,)))
    return dataclasses.replace(check, kind=kind, expected=None)
