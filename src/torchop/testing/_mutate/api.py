"""mutate: changes an operator's functions one by one, and asks `check` whether it notices."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import math
import multiprocessing
import os
import random
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torchop._compat import on_demand
from torchop._inspect.authored import authored_functions
from torchop.extend import Operator, OpLike
from torchop.testing._check.run import Budget
from torchop.testing._mutate.installing import CannotChangeError, Mutant, mutants_of
from torchop.testing._mutate.judging import Message, judge
from torchop.testing._mutate.report import MutationReport, Verdict
from torchop.testing._processes import ChildError, answers, forks_run_backward
from torchop.testing._progress import progress_bar

# Seconds that a check gets with a change, and how often what it takes without one.
_LEAST_SECONDS, _TIMES_AS_LONG = 5.0, 10.0
_LIMIT = 300.0  # seconds for a check without a change, which may compile something
_Changed = tuple[types.FunctionType, types.CodeType]


def mutate(
    op: OpLike,
    *examples: Any,
    reference: Callable[..., Any] | None = None,
    seed: int = 0,
    budget: float | None = None,
    only: str | Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> MutationReport:
    """Changes an operator's functions in small ways, and tells which changes no check notices.

    If a change goes unnoticed, you could make the same mistake and nothing would tell you, because
    your examples do not show it, or because there is no `reference` to compare with. `mutate`
    changes functions that are written in Python: kernels, fake kernels, formulas, vmap rules, and
    their helpers in the same file. It makes one change at a time: it replaces an operator such as
    `+`, a comparison, a number or a condition, swaps arguments, leaves out a statement or a call
    such as `.contiguous()`, or returns None for a gradient.

    Each change is made in a fork, so it may crash or hang without harm to the process itself. The
    checks run until one fails, and those that noticed most changes in the least time run first.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        examples: calls, as `check` takes them. Without any, the registered examples are used.
        reference: a function that is called like the operator, and returns or writes the right
            values. Without one, wrong values of a kernel go unnoticed.
        seed: the seed of random inputs, and of the order of the changes.
        budget: seconds after which no further change is made.
        only: the checks to run, as in `check`. By default, those that do not compile programs.
        rtol: the relative tolerance of comparisons.
        atol: the absolute tolerance of comparisons.

    Returns:
        A `MutationReport`, which prints itself, with a diff of each change that was not noticed.

    Raises:
        MissingRuleError: there are no examples, neither passed nor registered.
        RuntimeError: the operator ends the process without a change, or fails all checks; or the
            platform has no `fork`, or forks in which PyTorch runs no backward.
        TypeError, ValueError: as `check` does.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::halve", mutates_args=())
        ... def halve(x: torch.Tensor) -> torch.Tensor:
        ...     return x / 2
        >>> report = torchop.testing.mutate(halve, (torch.ones(2, 3),), only="memory.transposed")
        >>> [(verdict.mutant.change, verdict.outcome) for verdict in report.verdicts]
        [('/ to *', 'survived'), ('2 to 3', 'survived')]

    The idea is mutation testing, as mutmut and cosmic-ray do it for the tests of a project.
    """
    options = {"reference": reference, "seed": seed, "only": only, "rtol": rtol, "atol": atol}
    return run(op, lambda: examples, options, budget)


def run(
    op: OpLike,
    make_examples: Callable[[], Sequence[Any]],
    options: dict[str, Any],
    budget: float | None = None,
    timeout: float = _LIMIT,
) -> MutationReport:
    """Does what `mutate` does, with examples that only the forks make.

    Args:
        timeout: seconds that one check may take, with a change or without one.
    """
    Budget(budget, caller="mutate")  # raises if it is no budget
    if "fork" not in multiprocessing.get_all_start_methods():
        raise RuntimeError("mutate needs os.fork, which this platform lacks: use Linux or macOS.")
    if not forks_run_backward():
        raise RuntimeError(
            "mutate works in forks of this program, where PyTorch refuses to run a backward, "
            "perhaps after work, or fake tensors, on an accelerator. Call it before, on the CPU."
        )
    operator = Operator(op, "mutate")
    end = time.perf_counter() + (math.inf if budget is None else budget)
    started = time.perf_counter()
    on_demand.import_dynamo()  # once for all forks
    changes: list[tuple[Mutant, _Changed]] = []
    refused = {}
    for function, role in authored_functions(operator).items():
        try:
            for mutant, code in mutants_of(function, role):
                changes.append((mutant, (function, code)))
        except CannotChangeError as error:
            refused[f"{function.__qualname__} ({role})"] = str(error)
    if not changes and not refused:
        refused["the operator"] = "it has no function in Python"
    checks = _Checks(operator, op, make_examples, options, timeout)
    verdicts: dict[int, Verdict] = {}
    # By chance: what a budget leaves out is of no one function.
    places = random.Random(options["seed"]).sample(range(len(changes)), len(changes))
    with progress_bar(forks=True) as show:
        for number, place in enumerate(places):
            show(f"{operator} {number}/{len(places)}", number, len(places))
            mutant, changed = changes[place]
            late = time.perf_counter() > end
            verdict = Verdict(mutant, "not run") if late else checks.verdict(mutant, changed)
            verdicts[place] = verdict
    return MutationReport(
        str(operator),
        tuple(verdicts[place] for place in sorted(verdicts)),
        refused,
        tuple(checks.failing),
        options["seed"],
        time.perf_counter() - started,
        has_reference=options["reference"] is not None,
    )


class _Checks:
    """The checks that pass without a change, and what they have noticed so far."""

    def __init__(
        self,
        operator: Operator,
        op: OpLike,
        make_examples: Callable[[], Sequence[Any]],
        options: dict[str, Any],
        timeout: float,
    ) -> None:
        def run_checks(*more: Any) -> Iterator[Message]:
            return judge(op, make_examples(), options, *more)

        self._run_checks, self._timeout = run_checks, timeout
        self._seconds: dict[str, float] = {}
        self.failing: list[str] = []
        found: list[Message] = []
        current = "the start"
        with self._messages(itertools.repeat(timeout)) as messages:
            try:
                for message in messages:
                    current = message.name
                    found.append(message)
            except ChildError as error:
                raise RuntimeError(
                    f"mutate({operator}): without a change, it {error.problem}, in {current}. "
                    "Repair that first, or leave the check out with only=."
                ) from None
        for name in found.pop().value:
            with contextlib.suppress(Exception):
                importlib.import_module(name)  # here, so that no other fork has to
        results = [each.value for each in found if each.kind == "result"]
        for result in results:
            if result.outcome == "passed":
                self._seconds[result.check] = result.seconds
            elif result.outcome == "failed":
                self.failing.append(result.check)
        if not self._seconds:
            why = "; ".join(f"{r.check}: {r.outcome}: {r.message}" for r in results[:1])
            raise RuntimeError(
                f"mutate({operator}): no check passes without a change, so that none can notice "
                f"one. {why}"
            )
        self._calls = found[-1].value
        # Calls with results that are not the same each time tell nothing.
        with self._messages(itertools.repeat(timeout), []) as messages:
            again = [each.value for each in messages if each.kind == "calls"]
        for calls in again:
            self._calls = {k: v for k, v in self._calls.items() if calls.get(k) == v}
        self._tried = dict.fromkeys(self._seconds, 0)
        self._noticed = dict.fromkeys(self._seconds, 0)

    def _messages(
        self, limits: Iterator[float], *more: Any
    ) -> contextlib.AbstractContextManager[Iterator[Message]]:
        """What the checks say in a fork, whose output is for nobody."""
        return answers("fork", self._run_checks, more, limits, Exception, Path(os.devnull))

    def verdict(self, mutant: Mutant, changed: _Changed) -> Verdict:
        order = sorted(self._seconds, key=self._worth, reverse=True)
        check, calls = "the start", {}

        def limits() -> Iterator[float]:
            while True:
                longest = _LEAST_SECONDS + _TIMES_AS_LONG * self._seconds.get(check, 1.0)
                yield min(longest, self._timeout)

        with self._messages(limits(), order, changed) as messages:
            try:
                for message in messages:
                    check = message.name
                    if message.kind == "calls":
                        calls = message.value
                    elif message.kind == "result":
                        failed = message.value.outcome == "failed"
                        self._count(check, noticed=failed)
                        if failed:
                            return Verdict(mutant, "killed", check, message.value.message)
            except ChildError as error:
                if error.is_late:
                    return Verdict(mutant, "timed out", check, f"it {error.problem}")
                self._count(check, noticed=True)
                return Verdict(mutant, "killed", check, f"it {error.problem}")
            except Exception as error:  # such as of examples that the function itself makes
                return Verdict(mutant, "killed", "the start", str(error))
        same = all(calls.get(name) == digest for name, digest in self._calls.items())
        return Verdict(mutant, "equal" if same else "survived")

    def _worth(self, check: str) -> float:
        """How many changes a check is expected to notice in a second."""
        share = (self._noticed[check] + 1) / (self._tried[check] + 2)
        return share / (self._seconds[check] + 0.001)

    def _count(self, check: str, noticed: bool) -> None:
        if check in self._tried:
            self._tried[check] += 1
            self._noticed[check] += noticed
