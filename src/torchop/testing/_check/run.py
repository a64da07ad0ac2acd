"""List the checks that apply to an operator, and run them one at a time."""

from __future__ import annotations

import contextlib
import difflib
import fnmatch
import math
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torchop._accelerate import patterns as operator_patterns
from torchop.extend import OpLike, OpName, short_repr
from torchop.testing import probes
from torchop.testing._check import program
from torchop.testing._check.calls import (
    Call,
    CannotCheck,
    Example,
    ForkError,
    Refused,
    ValidError,
    breaks_contract,
    reason,
    text_of,
)
from torchop.testing._check.cases import Case, Details
from torchop.testing._check.checks import later_calls, providers, results
from torchop.testing._check.findings import NOT_THE_LAYOUT, Outcome, Result
from torchop.testing._check.shrink import shrunk
from torchop.testing._check.subject import Subject
from torchop.testing._check.table import CHECKS, CheckKind
from torchop.testing._errors import OpCheckError
from torchop.testing.process_state import quiet, restored

_LONGEST_MESSAGE = 1200
_SECONDS_TO_SHRINK = 3.0


@dataclass(frozen=True)
class Check:
    """A check to run on one operator."""

    subject: Subject
    kind: CheckKind

    @property
    def name(self) -> str:
        """The name of the check, such as `"memory.transposed"` or `"providers.agrees[triton]"`."""
        provider = self.subject.provider
        return self.kind.name if provider is None else f"{self.kind.name}[{provider.name}]"

    def is_named(self, pattern: str) -> bool:
        """Return whether `pattern` matches the name of this check.

        `pattern` may be a full name, the last part of a name, a family, or a wildcard such as
        `"memory.*"`. A name without a provider in brackets matches the check for every provider.
        """
        return any(is_named(name, pattern) for name in (self.name, self.kind.name))


def is_named(check: str, pattern: str) -> bool:
    family, _, last = check.partition(".")
    # Brackets in a check name enclose the name of a provider, as in "providers.agrees[triton]".
    # Escape them, because fnmatch would interpret them as a character set.
    return pattern in (family, last) or fnmatch.fnmatchcase(check, pattern.replace("[", "[[]"))


def plan_checks(
    op: OpLike,
    examples: Sequence[Any] = (),
    *,
    only: str | Sequence[str] | None = None,
    **options: Any,
) -> list[Check]:
    """Return the checks to run on an operator with `run_check`. See `check` for the arguments."""
    subject = Subject(op, examples, **options)
    planned = list(_planned(subject))
    if only is None:
        chosen = [c for c in planned if c.subject.provider or not c.kind.is_of_providers]
    else:
        patterns = (only,) if isinstance(only, str) else only
        chosen = [check for check in planned if any(map(check.is_named, patterns))]
        unknown = [p for p in patterns if not any(check.is_named(p) for check in planned)]
        if unknown or not chosen:
            name = unknown[0] if unknown else only
            problem = no_such_check(name, [check.name for check in planned])
            raise ValueError(f"check({subject}, only={short_repr(name)}): {problem}")
    for check in chosen:
        if check.kind.cases is later_calls.state:
            check.subject.needs_first_outcomes = True
    return chosen


def expected_failures(name: OpName, expected: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the checks of one operator that are expected to fail, with the reason for each.

    `expected` either maps check names to reasons, which then apply to all operators, or maps
    patterns of operator names to such dicts.
    """
    if any("::" in key for key in expected):
        expected = operator_patterns.value_for(name, expected) or {}
    for each in expected:
        if not any(is_named(kind.name, each.partition("[")[0]) for kind in CHECKS):
            raise ValueError(f"expected={{{short_repr(each)}: ...}}: {no_such_check(each)}")
    return expected


def no_such_check(name: object, known: Iterable[str] = ()) -> str:
    """Return the error text about an unknown check, with the most similar of the `known` names."""
    families = list(dict.fromkeys(kind.name.partition(".")[0] for kind in CHECKS))
    hint = nearest_check(name, families, known)
    return (
        f"no check has this name.{hint} Give the name of a check, its last part, or a family: "
        f"'memory.transposed', 'transposed'; the families are {', '.join(families)}."
    )


def nearest_check(name: object, families: Iterable[str] = (), known: Iterable[str] = ()) -> str:
    """Return a "Did you mean" hint with the full name of a check, or an empty string.

    By default, the known names are the names in the table.
    """
    known = list(known) or [kind.name for kind in CHECKS]
    suggestions = {each.partition(".")[2]: each for each in known}
    suggestions |= {each: each for each in (*families, *known)}
    close = difflib.get_close_matches(str(name), suggestions, n=1)
    return f" Did you mean {suggestions[close[0]]}?" if close else ""


def _planned(subject: Subject) -> Iterator[Check]:
    """Yield the checks of the reference kernel and of each provider, with costly checks last."""
    with_provider = list(providers.of_providers(subject))
    for is_costly in (False, True):
        some = [kind for kind in CHECKS if kind.is_costly is is_costly]
        for kind in some:
            if not (with_provider and kind.is_of_providers):
                yield Check(subject, kind)
        for each in with_provider:
            assert each.provider is not None
            for kind in some:
                can_run = kind.is_of_providers or not each.unsupported
                if can_run and kind.of_kernel(each.provider):
                    yield Check(each, kind)


def run_check(check: Check, *, end: float = math.inf) -> Result:
    """Run one check and return its result, which also reports exceptions raised by the check.

    `end` is the deadline, as a value of `time.perf_counter`. A check that does not finish before
    the deadline has the outcome "not run".
    """
    if check.subject.unsupported:
        message = f"the provider cannot run here: {check.subject.unsupported}"
        return Result(check.name, "cannot be done", message, question=check.kind.question)
    started = time.perf_counter()
    run = _Run(check, end)
    try:
        with quiet(), restored(), providers.ordered(check.subject):
            outcome, message, text = _renamed(run.outcome, f"{check.name} of {check.subject}")()
    except CannotCheck as error:
        outcome, message, text = "cannot be done", str(error), ""
    except ValidError as error:
        outcome, message, text = "failed", str(error), ""
        run.cause = _cause(error)
    except _OutOfTime:
        outcome, message, text = "not run", f"the budget ended after {run.cases} cases", ""
    except NotImplementedError as error:  # PyTorch has no kernel for a dtype or device
        outcome, message, text = "cannot be done", reason(error), ""
    except Exception as error:  # the operator raised before the first case
        outcome, message, text = "failed", f"preparing the check raised {reason(error)}", ""
        run.cause = _cause(error)
    except SystemExit:
        outcome, message, text = "failed", "the call raised SystemExit", ""
    return Result(
        check.name,
        outcome,
        shortened(message),
        text,
        check.kind.question,
        time.perf_counter() - started,
        run.cases,
        run.refused,
        run.details,
        run.cause,
        run.rejected,
        run.group,
        run.changes,
    )


def shortened(message: str) -> str:
    if len(message) <= _LONGEST_MESSAGE:
        return message
    half = _LONGEST_MESSAGE // 2 - 3
    return f"{message[:half]} ... {message[-half:]}"


def _renamed(method: Any, name: str) -> Callable[[], Any]:
    """Return a copy of a method under another name, so that faulthandler prints that name."""
    code = method.__func__.__code__.replace(co_name=name)
    return types.MethodType(types.FunctionType(code, globals()), method.__self__)


class _OutOfTime(Exception):  # noqa: N818  (not an error)
    """Raised to stop a check when its deadline has passed."""


class _Run:
    """Run the cases of one check (a call and a probe each) until one of them fails."""

    def __init__(self, check: Check, end: float) -> None:
        self.check, self.end = check, end
        self.subject = check.subject
        self.cases = self.refused = self.rejected = 0
        self.details: Details = {}
        self.cause = self.group = ""
        self.changes: tuple[str, ...] = ()

    def outcome(self) -> tuple[Outcome, str, str]:
        if time.perf_counter() > self.end:
            raise _OutOfTime
        # Some probes compare later calls with the first call of the operator in this process, so
        # make this first call before running any case.
        if self.subject.needs_first_outcomes:
            self.subject.needs_first_outcomes = False
            later_calls.note_first_outcomes(self.subject)
        _ = self.subject.first_calls
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
                except CannotCheck as error:
                    problem = error
                    continue
                self.cases += 1
                if failure is not None:
                    failed = case, failure
                    break
        except CannotCheck as error:  # explains why there are no more cases
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
            raise problem or CannotCheck("no variant applies")
        if refusals:
            self.details["refused by the operator"] = refusals
        return "passed", "", ""

    def failure(self, case: Case) -> Exception | None:
        """Run a case and return the exception from its probe, or None if the probe passes."""
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
            except NotImplementedError as error:
                raise Refused(reason(error)) from None
            except (CannotCheck, ValidError):
                raise
            except Exception as error:
                return error
        return None

    def _refusal(self, call: Call) -> Exception | None:
        """Return the exception if a call violates the schema, or None if the probe can run.

        Raise CannotCheck to skip the case if the operator rejects the arguments, or if another
        check has already reported the violation.
        """
        declined = self.subject.declined(call.example)
        if declined is not None:
            raise CannotCheck(declined)
        # Run only the kernel here. If the kernel raises, the operator rejects the arguments, but an
        # exception from the backward formula may be a bug, so leave it to the probe.
        with restored(), torch.no_grad():
            error = call.record.error
        if error is None:
            return None
        if breaks_contract(error):
            if self.subject.broken_in in (None, self.check.name):
                return error
            raise Refused(f"the call violates the schema; see {self.subject.broken_in}")
        if isinstance(error, ForkError) or not self.check.kind.takes_refused:
            raise Refused(reason(error))
        return None

    def _again(self, case: Case) -> Exception | None:
        try:
            return self.failure(case)
        except Exception:
            return None

    def _failed(self, case: Case, error: Exception) -> tuple[Outcome, str, str]:
        if breaks_contract(error):
            self.subject.broken_in = self.subject.broken_in or self.check.name
        # Shrinking also changes sizes that do not matter, so compare the case as it was generated.
        self.changes = changes_of(self.subject, case)
        if case.shrink:
            seconds = min(_SECONDS_TO_SHRINK, self.end - time.perf_counter())
            # Shrinking may raise NotImplementedError, because PyTorch has no kernels for some
            # dtypes. Ignore it, so that `check` still reports the failure.
            with contextlib.suppress(NotImplementedError):
                case = shrunk(case, self._again, seconds)
                error = self._again(case) or error
        self.cause, self.group = _cause(error), case.group
        text = shortened(self._with_names(case, text_of(error)))
        message = f"{case.label}: {type(error).__name__}: {text}"
        if isinstance(error, AssertionError):
            message = text
            if not message.startswith(case.label):
                message = f"{case.label}: {message}"
        probe, options = _probe(self.check, case, self.subject.call(case))
        is_compared = probe is results.same_as_contiguous and not breaks_contract(error)
        is_example = case.group == "plain" and isinstance(error, AssertionError)
        if (case.arrange or is_example) and is_compared and self._fails_contiguous(case, options):
            self.group = "size" if case.group == "layout" else case.group
            message += f"\n{NOT_THE_LAYOUT}: the same values fail in contiguous memory too."
            if not is_example:
                message += (
                    " If no caller may pass them, reject them: register_examples(..., valid=...)."
                )
        text = _program(self.check, case, probe, options)
        return "failed", message, text

    def _with_names(self, case: Case, text: str) -> str:
        """Replace the numbers of inputs in messages of gradcheck with the names of arguments."""
        names = self.subject.call(case).differentiable
        if case.group != "gradient":
            return text
        return re.sub(
            r"(?<=with respect to )input (\d+)",
            lambda found: names[int(found[1])] if int(found[1]) < len(names) else found[0],
            text,
        )

    def _fails_contiguous(self, case: Case, options: Any) -> bool:
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
    if case.probe is None:
        return check.kind.probe, check.kind.options(check.subject, case, call)
    options = case.options(call.example) if callable(case.options) else case.options
    return case.probe, dict(options)


def changes_of(subject: Subject, case: Case) -> tuple[str, ...]:
    """Return the layout, dtypes and sizes of a case that no example has, for `Result.changes`."""

    def properties(tensors: Sequence[torch.Tensor]) -> set[str]:
        return {
            *(str(tensor.dtype) for tensor in tensors),
            *(f"size {size}" for tensor in tensors for size in tensor.shape),
        }

    tensors = list(filter(probes.is_plain, case.arguments().tensors))
    known = [t for example in subject.examples for t in example.tensors if probes.is_plain(t)]
    changes = sorted(properties(tensors) - properties(known))
    return tuple(changes if all(map(_is_contiguous, tensors)) else ["layout", *changes])


def _is_contiguous(tensor: torch.Tensor) -> bool:
    is_view = tensor.storage_offset() or tensor.is_neg() or tensor.is_conj()
    return tensor.is_contiguous() and not is_view


def program_of(check: Check, case: Case) -> str:
    """Return the source of a program that makes the call of a case, without making the call.

    The call may crash the process, so the pytest plugin writes this program to a file beforehand.
    """
    options = case.options if isinstance(case.options, Mapping) else {}
    return _program(check, case, case.probe or results.succeeds, options)


def _program(check: Check, case: Case, probe: Any, options: Mapping[str, Any]) -> str:
    comment = f"{check.name} of {check.subject}: {case.label}"
    order = providers.order_of(check.subject)
    example = case.arguments()
    return program.write(check.subject.op, probe, *example, dict(options), comment, order)


def _cause(error: BaseException) -> str:
    """Describe the exception from the operator that caused a failure.

    If the operator raised no exception, i.e. if a probe found an incorrect result, return "".
    """
    # Dynamo wraps exceptions from the kernel in its own exceptions, so unwrap them.
    is_of_dynamo = "dynamo" in type(error).__module__
    behind = error.__cause__ or (error.__context__ if is_of_dynamo else None)
    if behind is not None:
        return _cause(behind)
    if isinstance(error, (AssertionError, OpCheckError)):
        return ""
    # Strip the suffix "(in ... of ...)", which names the traced call. With the suffix, two failures
    # with the same cause would look different and would not be grouped.
    return re.sub(r" \(in [^()]* of [^()]*\)$", "", reason(error))
