"""`python -m torchop check`: runs the checks of `torchop.testing.check` on operators.

Each operator is checked in a process of its own, so that a crash is a finding.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from torchop import MissingRuleError
from torchop._accelerate import patterns
from torchop._compat import on_demand
from torchop.cli.child_process import answers_of, preload, report_errors
from torchop.cli.selection import Selection, file_to_write, require, selecting
from torchop.extend import OpName, short_text
from torchop.testing import CheckReport, Result
from torchop.testing._check.api import call_costs
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.expected import Expectation, as_expected, expected_for, unmet
from torchop.testing._check.findings import Outcome
from torchop.testing._check.report import write_html, write_json
from torchop.testing._check.run import Budget, Check, plan_checks, program_of
from torchop.testing._check.subject import Subject
from torchop.testing._processes import ChildError
from torchop.testing._progress import progress_bar

_TAIL = 2**16  # bytes of the output of a child, of which a message shows a part
# Called with the share of the checks that are done, and the name of the next.
_Progress = Callable[[float, str], None]


class Request(NamedTuple):
    """How operators are checked, for the process that does it."""

    modules: tuple[str, ...]  # what it imports
    examples: str | None  # "module:name" of examples by operator
    reference: str | None  # "module:name" of references by operator
    expected: str | None  # "module:name" of the failures that are known
    only: tuple[str, ...]  # names of checks; none stands for all
    seed: int
    timeout: float  # seconds for one check
    budget: float | None  # seconds for all checks of one operator


class NotCheckedError(click.ClickException):
    """Why an operator cannot be checked, which is not the caller's mistake."""


def seconds(ctx: Any, param: Any, value: float | None) -> float | None:
    """A number of seconds, or None; raises click.BadParameter for what is none."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value:g} is not a number of seconds above 0")
    return value


@click.command()
@selecting
@click.option(
    "-k",
    "only",
    multiple=True,
    metavar="CHECK",
    help="Checks to run: a name, a family or a pattern.",
)
@click.option("--seed", default=0, show_default=True, help="The seed of random inputs.")
@click.option("--examples", metavar="MODULE:NAME", help="A dict from operators to their examples.")
@click.option(
    "--reference", metavar="MODULE:NAME", help="A dict from operators to functions that are right."
)
@click.option(
    "--expected", metavar="MODULE:NAME", help="A dict from checks that may fail to reasons."
)
@click.option(
    "--budget", type=float, callback=seconds, help="Seconds for all checks of one operator."
)
@click.option(
    "--allow-not-run",
    is_flag=True,
    help="Checks that the budget leaves out do not count as failures.",
)
@click.option(
    "--timeout",
    default=300.0,
    callback=seconds,
    show_default=True,
    help="Seconds that one check may take.",
)
@file_to_write("--report", help="Write a page of HTML.")
@file_to_write("--json", "json_path", help="Write JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show checks that did not fail, too.")
def check(
    selection: Selection,
    report: Path | None,
    json_path: Path | None,
    allow_not_run: bool,
    verbose: bool,
    **options: Any,
) -> None:
    """Checks operators on inputs that their authors did not try.

    The command runs the checks of torchop.testing.check. They start from the examples that are
    registered with the operators, or from those of --examples. Each operator runs in a process of
    its own. If it crashes or hangs, that check has failed, and the other checks go on.

    --expected lists known failures, as the argument of pytest.mark.torchop does: by check, or by
    operator and then by check. A known failure does not count as a failure. A check that is listed
    and passes does.

    The exit code is 0 if no check failed, and 1 if one did, or was not run although that was not
    allowed, or no operator has examples.
    """
    if report is not None:
        require("jinja2", "--report")  # before the checks run, which take minutes
    request = Request(selection.modules, **options)
    reports, unchecked = check_operators(selection.operators, request)
    reports = [dataclasses.replace(each, allow_not_run=allow_not_run) for each in reports]
    for each in reports:
        click.echo(str(each) if verbose else each.in_short())
    for problem in unchecked:
        click.echo(f"not checked: {problem}")
    failed = sum(not each.ok for each in reports)
    click.echo(
        f"\noperators: {len(reports)} checked, {failed} with failures, {len(unchecked)} not checked"
    )
    if report is not None:
        write_html(reports, report)
    if json_path is not None:
        write_json([each.to_dict() for each in reports], json_path)
    sys.exit(0 if reports and not failed else 1)


def check_operators(
    operators: Sequence[str], request: Request
) -> tuple[list[CheckReport], list[str]]:
    """The reports, and why some operators have none."""
    # Imported once for all, as is Dynamo, which many checks need, and which takes a second.
    preload([__name__, on_demand.import_dynamo(), *request.modules])
    reports: list[CheckReport] = []
    unchecked = []
    with progress_bar() as show:
        for number, op in enumerate(operators):

            def progress(share: float, name: str, op: str = op, before: int = number) -> None:
                show(f"{op} {name}", before + share, len(operators))

            progress(0, "")
            try:
                reports.append(_check_operator(op, request, progress))
            except NotCheckedError as error:
                unchecked.append(str(error))
    return reports, unchecked


def _check_operator(op: str, request: Request, progress: _Progress) -> CheckReport:
    """Checks an operator; a check that ends its process has failed, and the others go on.

    Raises:
        NotCheckedError: there are no examples of a call, or its process cannot be started.
        click.ClickException: a module cannot be imported, or there is no such check.
    """
    started_at = time.perf_counter()
    spent, since = 0.0, started_at  # of the budget, which starting a process does not take
    schema, expected, costs = op, dict[str, Expectation | None](), None
    results: dict[str, Result] = {}
    with tempfile.TemporaryDirectory(prefix="torchop-") as name:
        folder, current = Path(name), ""
        while True:
            args = op, request, tuple(results), spent, folder
            output = folder / "output"
            try:
                modules, limit = request.modules, request.timeout
                with answers_of(_messages, args, limit, modules, output) as messages:
                    for kind, value in messages:
                        match kind:
                            case "planned":
                                expected, schema = value
                                since = time.perf_counter()
                            case "check":
                                current = value
                                progress(len(results) / len(expected), current)
                            case "result":
                                results[current], current = value, ""
                            case "costs":
                                costs = value
                if costs is not None:
                    break
                spent += time.perf_counter() - since
            except ChildError as error:
                spent += time.perf_counter() - since
                if not expected:
                    raise NotCheckedError(f"{op}: {error}") from None
                if not current:  # between two checks, or after the last one
                    message = f"the process that was to run it {error.problem}"
                    left = [name for name in expected if name not in results]
                    # That it ended is a finding, also where the others may be left out.
                    for name in left:
                        outcome: Outcome = "failed" if name == left[0] else "not run"
                        results[name] = Result(name, outcome, message)
                    break
                crash = _crash(current, error.problem, folder)
                results[current], current = as_expected(crash, expected[current]), ""
    checked = [results[name] for name in expected if name in results]
    checked += unmet(expected, checked)
    seconds = time.perf_counter() - started_at
    return CheckReport(op, schema, tuple(checked), request.seed, seconds, costs or {})


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
    if wrote:
        message += f" It wrote: {wrote}"
    return Result(check, "failed", message, text, cause=f"the call {problem}")


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
    examples, reference = examples_of(request, op), reference_of(request, op)
    expected: Mapping[str, str] | None = None
    if request.expected is not None:
        with report_errors(f"--expected {request.expected}"):
            expected = expected_for(op, _mapping(request.expected, "checks to reasons"))
    try:
        checks = plan_checks(
            op,
            examples,
            reference=reference,
            seed=request.seed,
            only=request.only or None,
            expected=expected,
        )
    except MissingRuleError:
        raise NotCheckedError(
            f"{op} has no examples; register some with register_examples, or pass --examples"
        ) from None
    except Exception as error:
        raise click.ClickException(str(error)) from None
    yield "planned", ({c.name: c.expected for c in checks}, str(checks[0].subject.schema))
    budget = Budget(request.budget, spent)
    for check in (each for each in checks if each.name not in done):
        written = _written(check, folder)  # first: what ends the process now has no case yet
        yield "check", check.name
        result = budget.run(written)
        yield "result", result
        is_wrong = result.outcome in ("failed", "expected failure")
        if is_wrong and check.name.startswith("memory."):
            return  # it may have written anywhere; after others, starting one takes too long
    yield "costs", call_costs(checks[0].subject)


def examples_of(request: Request, op: str) -> tuple[Any, ...]:
    """The examples that --examples has of an operator; none without it."""
    if request.examples is None:
        return ()
    with report_errors(f"--examples {request.examples}"):
        by_pattern = _mapping(request.examples, "operators to examples")
        return tuple(patterns.value_for(OpName.parse(op), by_pattern) or ())


def reference_of(request: Request, op: str) -> Any:
    """The function that --reference has for an operator; None without one."""
    if request.reference is None:
        return None
    with report_errors(f"--reference {request.reference}"):
        by_pattern = _mapping(request.reference, "operators to functions")
        return patterns.value_for(OpName.parse(op), by_pattern)


def _mapping(place: str, what: str) -> Mapping[str, Any]:
    """A mapping in a module, or that a function there returns: "module:name"."""
    module, separator, attribute = place.partition(":")
    if not separator:
        raise ValueError("write module:name, such as tests.examples:EXAMPLES")
    value = getattr(importlib.import_module(module), attribute)
    mapping = value() if callable(value) else value
    if not isinstance(mapping, Mapping):
        raise TypeError(f"it is not a mapping of {what}: {type(mapping).__name__}")
    return mapping


def _written(check: Check, folder: Path) -> Check:
    """The check; before each of its cases is tried, its label and its program are in a file."""
    file = folder / "case"
    file.write_text("", encoding="utf-8")

    def cases(subject: Subject, details: Details) -> Iterator[Case]:
        for case in check.kind.cases(subject, details):
            text = f"{case.label}\n{_program(check, case)}"
            file.write_text(text, encoding="utf-8", errors="replace")
            os.truncate(folder / "output", 0)  # what is told of a crash is of this call
            yield case

    return dataclasses.replace(check, kind=dataclasses.replace(check.kind, cases=cases))


def _program(check: Check, case: Case) -> str:
    try:
        return program_of(check, case)
    except Exception:  # what cannot be written is tried all the same
        return ""
