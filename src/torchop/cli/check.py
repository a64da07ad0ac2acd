"""`python -m torchop check`: run each check of `torchop.testing.check` as a pytest test.

The tests run in worker processes of pytest-xdist. If a kernel crashes, it takes down only its
worker process, and the report shows the crash as a failed check.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

import torchop
from torchop._accelerate import patterns
from torchop.cli.child_process import report_errors
from torchop.cli.selection import Selection, file_to_write, require, selecting
from torchop.extend import OpName
from torchop.testing import CheckReport
from torchop.testing._check.report import write_json
from torchop.testing._check.run import expected_failures, plan_checks
from torchop.testing.process_state import set_environment

_MAPPINGS = ("examples", "reference", "expected")
_PLUGINS = ("xdist.plugin", "pytest_timeout", "pytest_torchop")
_MOST_CRASHES = 100
_TESTS = """\
import sys
import pytest
sys.path[:] = {path!r}  # pytest-xdist passes an older value
from torchop.cli.child_process import import_all
from torchop.cli.check import mapping

import_all({modules!r})

@pytest.mark.torchop(*{operators!r}, {options})
def test_operators(torchop_check):
    torchop_check()
"""


def _seconds(ctx: Any, param: Any, value: float) -> float:
    # click.FloatRange would accept nan and inf.
    if not 0 < value < math.inf:
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
    "--reference", metavar="MODULE:NAME", help="A dict from operators to reference functions."
)
@click.option(
    "--expected", metavar="MODULE:NAME", help="A dict of known failures, by operator and check."
)
@click.option(
    "--timeout",
    default=300.0,
    callback=_seconds,
    show_default=True,
    help="The time limit of one check, in seconds.",
)
@click.option(
    "--jobs",
    default=1,
    type=click.IntRange(1),
    show_default=True,
    help="The number of pytest-xdist workers.",
)
@click.option(
    "--from-tests",
    "from_tests",
    multiple=True,
    metavar="PATTERN",
    help="Run a test suite, and check the operators that match, with its calls as examples. The "
    "arguments after -- are the command, such as: -- pytest tests",
)
@file_to_write("--json", "json_path", help="Write JSON.")
@click.option("-v", "--verbose", is_flag=True, help="Show checks that did not fail, too.")
def check(
    selection: Selection,
    json_path: Path | None,
    timeout: float,
    jobs: int,
    verbose: bool,
    from_tests: tuple[str, ...],
    **options: Any,
) -> None:
    """Check operators on generated inputs.

    The command runs each check of torchop.testing.check as a pytest test. Checks start from the
    registered examples, or from --examples. A check that crashes or hangs fails, and the others
    continue in another process.

    --expected lists known failures with their reasons, by check, or by operator and check. A check
    in this list is allowed to fail, and is reported as a failure if it passes.

    With --from-tests, the command runs a test suite, and uses its calls as examples:

    python -m torchop check --from-tests "mylib::*" -- pytest tests

    The exit code is 0 if no check failed, and 1 if a check failed or no operator has examples.
    """
    if from_tests:
        sys.exit(_run_suite(from_tests, selection.operators, options["only"], json_path))
    for package in ("pytest", "xdist", "pytest_timeout"):
        require(package, "check", "check")
    options = {name: value for name, value in options.items() if value}
    operators, unchecked = _with_examples(selection.operators, options)
    reports = _run(selection.modules, operators, options, timeout, jobs) if operators else []
    missing = sorted({*operators} - {each.op for each in reports})
    unchecked += [f"{op}: its worker crashed before the first check" for op in missing]
    for each in reports:
        click.echo(str(each) if verbose else each.in_short())
    for problem in unchecked:
        click.echo(f"not checked: {problem}")
    failed = sum(not each.ok for each in reports)
    click.echo(
        f"\noperators: {len(reports)} checked, {failed} with failures, {len(unchecked)} not checked"
    )
    if json_path is not None:
        write_json([each.to_dict() for each in reports], json_path)
    sys.exit(0 if reports and not failed and not missing else 1)


def _run_suite(
    patterns: tuple[str, ...],
    command: tuple[str, ...],
    only: tuple[str, ...],
    json_path: Path | None,
) -> int:
    """Run pytest with the options of torchop's pytest plugin, and return its exit code."""
    require("pytest", "check --from-tests", "check")
    words = list(command)
    if Path(words[0]).name.startswith("python") and words[1:2] == ["-m"]:
        words = words[2:]
    if Path(words[0]).name not in ("pytest", "py.test"):
        raise click.UsageError(
            f"check --from-tests runs pytest, but the command is {' '.join(command)}. Write: "
            'check --from-tests "mylib::*" -- pytest tests'
        )
    installed = importlib.metadata.entry_points(group="pytest11")
    has_plugin = any(point.value == "pytest_torchop" for point in installed)
    arguments = [sys.executable, "-m", "pytest", *([] if has_plugin else ["-p", "pytest_torchop"])]
    arguments += words[1:]
    arguments += [f"--torchop-check={pattern}" for pattern in patterns]
    arguments += [f"--torchop-check-only={name}" for name in only]
    if json_path is not None:
        arguments.append(f"--torchop-report={json_path}")
    return subprocess.run(arguments).returncode


def _with_examples(
    operators: tuple[str, ...], options: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return the operators that have examples, and messages about operators that have none.

    This function also plans the checks of the first operator that has examples. If a command-line
    option is invalid, the planning raises a ClickException before any check runs.
    """
    values = {}
    for name in set(_MAPPINGS) & options.keys():
        with report_errors(f"--{name} {options[name]}"):
            values[name] = mapping(options[name])
    found: list[str] = []
    unchecked: list[str] = []
    for op in operators:
        examples = patterns.value_for(OpName.parse(op), values.get("examples", {}))
        if not examples and not torchop.get_rule("examples").has(op):
            unchecked.append(
                f"{op} has no examples; register some with register_examples, or pass --examples"
            )
            continue
        if not found:
            try:
                plan_checks(op, examples or (), only=options.get("only"))
                expected_failures(OpName.parse(op), values.get("expected", {}))
            except Exception as error:
                raise click.ClickException(str(error)) from None
        found.append(op)
    return found, unchecked


def mapping(place: str) -> Mapping[str, Any]:
    """Import the mapping at "module:name". If it is a function, call it and return its result."""
    module, separator, attribute = place.partition(":")
    if not separator:
        raise ValueError("write module:name, such as tests.examples:EXAMPLES")
    value = getattr(importlib.import_module(module), attribute)
    found = value() if callable(value) else value
    if not isinstance(found, Mapping):
        raise TypeError(f"expected a mapping, got {type(found).__name__}")
    return found


def _run(
    modules: tuple[str, ...],
    operators: list[str],
    options: Mapping[str, Any],
    timeout: float,
    jobs: int,
) -> list[CheckReport]:
    import pytest  # late, because torchop does not depend on pytest

    texts = {n: f"mapping({v!r})" if n in _MAPPINGS else repr(v) for n, v in options.items()}
    # In the pytest marker, a name without an overload selects all overloads of the operator, so
    # exclude the overloads that the user did not select.
    others = [name for name in patterns.all_names() if str(name) not in operators]
    texts["exclude"] = repr(
        [str(each) for each in others if any(patterns.is_match(each, op) for op in operators)]
    )
    marked = ", ".join(f"{name}={text}" for name, text in texts.items())
    with tempfile.TemporaryDirectory(prefix="torchop-") as folder:
        tests, found = Path(folder, "test_operators.py"), Path(folder, "report.json")
        text = _TESTS.format(path=sys.path, modules=modules, operators=operators, options=marked)
        tests.write_text(text)
        Path(folder, "pytest.ini").write_text("[pytest]\n")
        arguments = [
            *(str(tests), "-q", "--tb=no", "--no-summary", "-p", "no:cacheprovider"),
            *(text for plugin in _PLUGINS for text in ("-p", plugin)),
            *(f"--numprocesses={jobs}", "--dist=load"),
            f"--max-worker-restart={_MOST_CRASHES}",
            *(f"--timeout={timeout:g}", "--timeout-method=thread", f"--torchop-report={found}"),
        ]
        problems = _CollectionErrors()
        environment = dict(os.environ)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        os.environ.pop("PYTEST_ADDOPTS", None)
        try:
            with contextlib.redirect_stdout(sys.stderr):  # keep standard output for our reports
                pytest.main(arguments, plugins=[problems])
        finally:
            set_environment(environment)
        if problems.texts:
            raise click.ClickException(problems.texts[0])
        values = json.loads(found.read_text(encoding="utf-8")) if found.exists() else []
    return [CheckReport.from_dict(value) for value in values]


class _CollectionErrors:
    """A pytest plugin that records the errors of workers that cannot collect the tests."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.texts.append(report.longreprtext)
