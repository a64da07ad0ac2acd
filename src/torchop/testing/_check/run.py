"""Planning checks, and running one."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchop.extend import OpLike, short_repr
from torchop.testing import probes
from torchop.testing._check import program
from torchop.testing._check.calls import (
    Call,
    CannotCheck,
    Example,
    ForkError,
    Refused,
    breaks_contract,
    reason,
    text_of,
)
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks import providers, results
from torchop.testing._check.expected import Expectation, as_expected, cut
from torchop.testing._check.findings import Outcome, Result
from torchop.testing._check.shrink import shrunk
from torchop.testing._check.subject import Subject, ValidError
from torchop.testing._check.table import CHECKS, CheckKind
from torchop.testing._errors import OpCheckError
from torchop.testing.process_state import quiet, restored


@dataclass(frozen=True)
class Check:
    """One check of one operator, which has not run.

    Attributes:
        subject: the operator with its examples.
        kind: what is checked.
        expected: that it fails; None if it is not expected to.
    """

    subject: Subject
    kind: CheckKind
    expected: Expectation | None = None

    @property
    def name(self) -> str:
        """The name of the check, such as `"memory.transposed"`, or `"providers.agrees[triton]"`."""
        provider = self.subject.provider
        return self.kind.name if provider is None else f"{self.kind.name}[{provider.name}]"

    def is_named(self, name: str) -> bool:
        """Whether a name or pattern stands for it; without a provider, for the reference."""
        if self.kind.is_of_providers and _is_named(self.kind.name, name):
            return True
        return _is_named(self.name, name)


def plan_checks(
    op: OpLike,
    examples: Sequence[Any] = (),
    *,
    expected: Mapping[str, str] | None = None,
    only: str | Sequence[str] | None = None,
    **options: Any,
) -> list[Check]:
    """The checks of an operator, each of which `run_check` runs; the arguments are `check`'s."""
    planned = list(_planned(Subject(op, examples, **options)))
    patterns = (only,) if isinstance(only, str) else only
    chosen = [check for check in planned if _is_chosen(check, patterns)]
    subject = planned[0].subject
    if not isinstance(expected, Mapping | None):
        raise TypeError(
            f"check({subject}, expected=...): expected is a dict from the names of checks to the "
            "reasons why they fail, such as {'memory.transposed': 'not written yet'}; got "
            f"{type(expected).__name__}."
        )
    reasons = dict(expected or {})
    wrong: list[tuple[str, object]] = [] if chosen else [("only", only)]
    wrong += [("only", p) for p in patterns or () if not any(_is_chosen(c, (p,)) for c in planned)]
    # Of several operators, not all have the same providers.
    plain = {name: name.partition("[")[0] for name in reasons}
    wrong += [
        ("expected", n) for n in reasons if not any(_is_named(k.name, plain[n]) for k in CHECKS)
    ]
    if wrong:
        option, name = wrong[-1]
        families = ", ".join(dict.fromkeys(kind.name.partition(".")[0] for kind in CHECKS))
        raise ValueError(
            f"check({subject}, {option}={short_repr(name)}): no check has such a name. Give the "
            f"name of a check, its last part, or a family: 'memory.transposed', 'transposed'; the "
            f"families are {families}."
        )
    expectations = [Expectation(*item) for item in reasons.items()]
    return [
        dataclasses.replace(
            check, expected=next((e for e in expectations if check.is_named(e.name)), None)
        )
        for check in chosen
    ]


def _planned(subject: Subject) -> Iterator[Check]:
    """All checks of an operator with the reference, and those of each provider."""
    under = list(providers.of_providers(subject))
    for is_costly in (False, True):
        some = [kind for kind in CHECKS if kind.is_costly is is_costly]
        for kind in some:
            if not (under and kind.is_of_providers):
                yield Check(subject, kind)
        for each in under:
            assert each.provider is not None
            for kind in some:
                can_run = kind.is_of_providers or not each.unsupported
                if can_run and kind.of_kernel(each.provider):
                    yield Check(each, kind)


def _is_chosen(check: Check, patterns: Sequence[str] | None) -> bool:
    kind = check.kind
    if patterns is None:
        return not kind.is_of_providers or check.subject.provider is not None
    return any(check.is_named(p) or _is_named(kind.name, p) for p in patterns)


def _is_named(check: str, name: str) -> bool:
    family, _, last = check.partition(".")
    # The brackets are those of a provider.
    return name in (family, last) or fnmatch.fnmatchcase(check, name.replace("[", "[[]"))


def run_check(check: Check, *, end: float | None = None) -> Result:
    """Runs one check. It raises nothing: what goes wrong is in the result.

    Args:
        check: one of `plan_checks`.
        end: when to stop, on the clock of `time.perf_counter`; a check that has not answered by
            then was not run.
    """
    if check.subject.unsupported:
        message = f"the provider cannot run here: {check.subject.unsupported}"
        return Result(check.name, "cannot be done", message, question=check.kind.question)
    started = time.perf_counter()
    run = _Run(check, end)
    try:
        # Some calls are made to see whether they are refused.
        with quiet(), restored(), providers.ordered(check.subject):
            outcome, message, text = _named(run.outcome, f"{check.name} of {check.subject}")()
    except CannotCheck as error:
        outcome, message, text = "cannot be done", str(error), ""
    except ValidError as error:
        outcome, message, text = "failed", str(error), ""
        run.cause = _cause(error)
    except _OutOfTime:
        outcome, message, text = "not run", f"the budget ended after {run.cases} cases", ""
    except NotImplementedError as error:  # of PyTorch, which has few kernels for some dtypes
        outcome, message, text = "cannot be done", reason(error), ""
    except Exception as error:  # of the operator, where a check asks it before the first case
        outcome, message, text = "failed", f"while it was prepared: {reason(error)}", ""
        run.cause = _cause(error)
    except SystemExit:
        outcome, message, text = "failed", "the call raised SystemExit, which ends a program", ""
    result = Result(
        check.name,
        outcome,
        cut(message),
        text,
        check.kind.question,
        time.perf_counter() - started,
        run.cases,
        run.refused,
        run.details,
        run.cause,
        run.rejected,
        run.group,
    )
    return as_expected(result, check.expected)


def _named(method: Any, name: str) -> Callable[[], Any]:
    """The method under another name, which is in the traceback that Python writes if it crashes."""
    code = method.__func__.__code__.replace(co_name=name)
    return types.MethodType(types.FunctionType(code, globals()), method.__self__)


class Budget:
    """Seconds that the checks of one operator may take together.

    Args:
        seconds: how many; None if they may take as long as they do.
        spent: how many of these are gone.
        caller: the function that takes a budget, for messages.
    """

    def __init__(self, seconds: float | None, spent: float = 0.0, *, caller: str = "check") -> None:
        what = f"{caller}(..., budget={short_repr(seconds)})"
        if not isinstance(seconds, int | float | None):
            raise TypeError(f"{what}: budget is a number of seconds, or None.")
        if seconds is not None and not seconds >= 0:  # nan, too
            raise ValueError(
                f"{what}: no check would run, and none would fail. Pass a number of seconds, or "
                "None."
            )
        self._seconds, self._spent = seconds, spent

    def run(self, check: Check) -> Result:
        """Runs a check, if there is time left."""
        if self._seconds is None:
            return run_check(check)
        if self._spent >= self._seconds:
            message = f"the budget of {self._seconds:g} s was spent"
            return Result(check.name, "not run", message, question=check.kind.question)
        started = time.perf_counter()
        result = run_check(check, end=started + self._seconds - self._spent)
        self._spent += time.perf_counter() - started
        return result


class _OutOfTime(Exception):  # noqa: N818  (not an error)
    """The budget ended."""


class _Run:
    """The cases of one check, one after the other, up to the first that fails."""

    def __init__(self, check: Check, end: float | None) -> None:
        self.check, self.end = check, math.inf if end is None else end
        self.subject = check.subject
        self.cases = self.refused = self.rejected = 0
        self.details: Details = {}
        self.cause = self.group = ""

    def outcome(self) -> tuple[Outcome, str, str]:
        _ = self.subject.first_calls  # before any other, so that a later one can be compared
        refusals: dict[str, str] = {}
        rejected = self.subject.counts["rejected"]
        problem: CannotCheck | None = None
        failed: tuple[Case, Exception] | None = None
        try:
            for case in self.check.kind.cases(self.subject, self.details):
                if time.perf_counter() > self.end:
                    raise _OutOfTime
                try:
                    failure = self.failure(case)
                except Refused as error:
                    self.refused += 1
                    refusals.setdefault(case.label, str(error))
                    failure = None
                except CannotCheck as error:  # there is no such variant
                    problem = error
                    continue
                self.cases += 1
                if failure is not None:
                    failed = case, failure
                    break
        except CannotCheck as error:  # of the generator: why there are no more cases
            problem = problem or error
        finally:
            self.rejected = self.subject.counts["rejected"] - rejected
        if failed is not None:
            return self._failed(*failed)
        if refusals and self.cases == self.refused:
            first, why = next(iter(refusals.items()))
            raise CannotCheck(f"{why} ({first})")
        if not self.cases and self.rejected:
            raise CannotCheck(f"'valid' of register_examples rejects all {self.rejected} variants")
        if not self.cases:
            raise problem or CannotCheck("there is nothing to try")
        if refusals:
            self.details["refused by the operator"] = refusals
        return "passed", "", ""

    def failure(self, case: Case) -> Exception | None:
        """Return what the probe raises.

        Raises:
            CannotCheck: it cannot read the call.
        """
        subject = self.subject
        with restored():
            call = subject.call(case)
            if case.calls and (broken := self._refusal(call)) is not None:
                return broken
            probe, options = _probe(self.check, case, call)
            try:
                if program.is_public(probe):
                    probe(subject.op, *call.example.copy(), **options)
                else:
                    probe(call, **options)
            except NotImplementedError as error:  # refused, only later than by the call
                raise Refused(reason(error)) from None
            except CannotCheck:
                raise
            except Exception as error:
                return error
        return None

    def _refusal(self, call: Call) -> Exception | None:
        """Return the exception of a call that breaks the contract; None if the call succeeds.

        Raises:
            CannotCheck: the call is refused.
        """
        declined = self.subject.declined(call.example)
        if declined is not None:
            raise CannotCheck(declined)
        # No gradients, because a formula that raises does not reject arguments. State of the
        # process is restored, so that it does not influence the probe.
        with restored(), torch.no_grad():
            error = call.record.error
        if error is None:
            return None
        if breaks_contract(error):
            if self.subject.broken_in in (None, self.check.name):
                return error
            raise Refused(f"the call breaks the contract, which {self.subject.broken_in} reports")
        if isinstance(error, ForkError) or not self.check.kind.takes_refused:
            raise Refused(reason(error))
        return None

    def _again(self, case: Case) -> Exception | None:
        """Return what the probe raises; None if it passes, or cannot read the call."""
        try:
            return self.failure(case)
        except Exception:
            return None

    def _failed(self, case: Case, error: Exception) -> tuple[Outcome, str, str]:
        if breaks_contract(error):
            self.subject.broken_in = self.subject.broken_in or self.check.name
        if case.shrink:
            seconds = min(3.0, self.end - time.perf_counter())
            case = shrunk(case, self._again, seconds)
            error = self._again(case) or error
        self.cause, self.group = _cause(error), case.group
        message = f"{case.label}: {type(error).__name__}: {cut(text_of(error))}"
        if isinstance(error, AssertionError):
            message = cut(text_of(error))
            if not message.startswith(case.label):
                message = f"{case.label}: {message}"
        probe, options = _probe(self.check, case, self.subject.call(case))
        is_compared = probe is results.same_as_contiguous and not breaks_contract(error)
        if case.arrange and is_compared and self._fails_contiguous(case, options):
            message += (
                "\nIt is not the layout: the same values fail in contiguous memory too. If no "
                "caller may pass them, reject them: register_examples(..., valid=...)."
            )
        text = _program(self.check, case, probe, options)
        return "failed", message, text

    def _fails_contiguous(self, case: Case, options: Any) -> bool:
        """Whether a comparison fails in fresh contiguous memory too, in one of two calls."""
        plain = Example(*probes.contiguous_copies(tuple(case.arguments())))
        if not self.subject.is_valid(plain):
            return False
        for _ in range(2):
            try:
                with restored():
                    results.same_as_contiguous(Call(self.subject.op, *plain), **options)
            except Exception:
                return True
        return False


def _probe(check: Check, case: Case, call: Call) -> tuple[Any, dict[str, Any]]:
    """Return the probe of a case, and its options."""
    if case.probe is None:
        return check.kind.probe, check.kind.options(check.subject, case, call)
    options = case.options(call.example) if callable(case.options) else case.options
    return case.probe, dict(options)


def program_of(check: Check, case: Case) -> str:
    """Return the program that makes the call of a case, and reads its record as the check does.

    It makes no call, so it can be written before one that may end the process.
    """
    options = case.options if isinstance(case.options, Mapping) else {}
    return _program(check, case, case.probe or results.succeeds, options)


def _program(check: Check, case: Case, probe: Any, options: Mapping[str, Any]) -> str:
    comment = f"{check.name} of {check.subject}: {case.label}"
    order = providers.order_of(check.subject)
    example = case.arguments()
    return program.write(check.subject.op, probe, *example, dict(options), comment, order)


def _cause(error: BaseException) -> str:
    """The exception behind a failure; empty if it is one of a check, which each words itself."""
    # Dynamo's exceptions hide the one that they are about.
    is_of_dynamo = "dynamo" in type(error).__module__
    behind = error.__cause__ or (error.__context__ if is_of_dynamo else None)
    if behind is not None:
        return _cause(behind)
    if isinstance(error, (AssertionError, OpCheckError)):
        return ""
    # A compile adds a note on where it was, which would make each of them another cause.
    return re.sub(r" \(in [^()]* of [^()]*\)$", "", reason(error))
