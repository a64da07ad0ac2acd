"""All checks of one operator, one after the other, within a budget."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from torchop._core.registry import OpLike
from torchop.testing._check.report import CheckReport, Result
from torchop.testing._check.run import Check, Expectation, plan_checks, run_check
from torchop.testing._check.subject import CannotCheck, Subject
from torchop.testing._timing import Timing, Way, timed
from torchop.testing.probes import restored


def run_all(
    op: OpLike, examples: Sequence[Any], *, budget: float | None = None, **options: Any
) -> CheckReport:
    """Plans the checks and runs them; what the budget has no time for says so."""
    started = time.perf_counter()
    end = None if budget is None else started + budget
    checks = plan_checks(op, examples, **options)
    results = [run_within(check, end, budget) for check in checks]
    return report_of(checks, results, time.perf_counter() - started)


def report_of(checks: Sequence[Check], results: Sequence[Result], seconds: float) -> CheckReport:
    """The report of the results of some checks of one operator."""
    subject = checks[0].subject
    expected = {check.name: check.expected for check in checks}
    results = [*results, *unmet(expected, results)]
    with restored():
        costs = call_costs(subject)
    return CheckReport(
        subject.name,
        str(subject.schema),
        tuple(results),
        subject.seed,
        seconds,
        costs,
    )


def unmet(
    expected: Mapping[str, Expectation | None], results: Sequence[Result]
) -> Iterator[Result]:
    """A failure for each name of several checks that were expected to fail, if all pass."""
    outcomes = {result.check: result.outcome for result in results}
    for expectation in dict.fromkeys(filter(None, expected.values())):
        together = {outcomes.get(name) for name, each in expected.items() if each == expectation}
        if together <= {"passed", "cannot be done"} and "passed" in together:
            yield Result(expectation.name, "failed", expectation.unmet)


def run_within(check: Check, end: float | None, budget: float | None) -> Result:
    """Runs a check, if there is time left of a budget of so many seconds, which ends then."""
    if end is not None and time.perf_counter() > end:
        message = f"the budget of {budget:g} s was spent"
        return Result(check.name, "not run", message, question=check.question)
    return run_check(check, end=end)


def call_costs(subject: Subject, seconds: float = 0.02) -> dict[str, float]:
    """Microseconds for one call of the first example that is accepted, by the way of calling."""
    try:
        example = subject.accepted(most=1)[0]
    except CannotCheck:
        return {}
    args, kwargs = example.copy()
    call = functools.partial(subject.op, *args, **kwargs)
    ways = {
        "torch.ops, inference mode": Way(lambda: call, torch.inference_mode),
        "torch.ops, no_grad": Way(lambda: call, torch.no_grad),
        "torch.ops, grad enabled": Way(lambda: call, torch.enable_grad),
    }
    function = getattr(subject.definition, "function", None)
    if function is not None and not subject.schema.is_mutable:
        alone = functools.partial(function, *args, **kwargs)
        ways["its Python function, no_grad"] = Way(lambda: alone, torch.no_grad)
    timings = timed(ways, (args, kwargs), seconds)
    return {
        way: round(timing.best, 3) for way, timing in timings.items() if isinstance(timing, Timing)
    }
