"""check: tries all kinds of inputs and uses of an operator, from one example."""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torchop._compat import optests
from torchop.extend import OpLike
from torchop.testing._check.calls import CannotCheck
from torchop.testing._check.expected import unmet
from torchop.testing._check.findings import Result
from torchop.testing._check.report import CheckReport
from torchop.testing._check.run import Budget, Check, plan_checks
from torchop.testing._check.subject import Subject
from torchop.testing._errors import OpCheckError
from torchop.testing._timing import Timing, Way, timed
from torchop.testing.process_state import restored


def check(
    op: OpLike,
    *examples: Any,
    reference: Callable[..., Any] | None = None,
    seed: int = 0,
    budget: float | None = None,
    allow_not_run: bool = False,
    expected: Mapping[str, str] | None = None,
    raise_exception: bool = True,
    only: str | Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> CheckReport:
    """Tries all kinds of inputs and uses of an operator, from a few examples of a call.

    It generates variants of the examples: other layouts in memory, other sizes, dtypes and values,
    and arguments that share memory. Each variant is compared with the same call on fresh contiguous
    copies, or with a reference. Gradients are compared with finite differences, `vmap` with a loop,
    and compiled and exported programs with eager mode. Other checks find what a call writes, keeps
    and leaks. A failing example is made smaller, and printed as a program.

    These checks are of the reference. If the operator has other providers, the kernel of each is
    compared with it, and what the provider says of itself is checked.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        examples: calls, each a tuple of arguments, a dict of them, or `(args, kwargs)`. Without
            any, the registered examples are used (`CustomOp.register_examples`). Use small tensors.
            Gradients are checked of all arguments that can have one, or, if some of an example
            require grad, of these alone.
        reference: a function that is called like the operator, and returns or writes the right
            values. It is called with contiguous copies.
        seed: the seed of random inputs; the same seed generates the same inputs.
        budget: seconds after which no more is tried; the report lists the checks that did not run.
        allow_not_run: whether checks that the budget left out do not count as failures.
        expected: reasons for known failures, by the name of a check, its last part, or a family. If
            such a check passes, that is a failure.
        raise_exception: whether to raise failures; otherwise they are only in the report.
        only: the checks to run: names, their last parts, families, or patterns such as
            `"memory.*"`.
        rtol: the relative tolerance of comparisons; as in `torch.testing.assert_close` by default.
        atol: the absolute tolerance of comparisons; 0 with `rtol=0` means equal to the bit.

    Returns:
        A `CheckReport`, which prints itself. A check that cannot be done says why there.

    Raises:
        MissingRuleError: there are no examples, neither passed nor registered.
        OpCheckError: a check failed, or was not run; the message tells of these.
        TypeError: an example has another form, or is not a call of the operator; or `expected` is
            not a dict, or `budget` is not a number.
        ValueError: an example has no data, `only` or `expected` names no check, or `budget` is
            below 0.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::flat_sum", mutates_args=())
        ... def flat_sum(x: torch.Tensor) -> torch.Tensor:
        ...     memory = torch.empty(0).set_(x.untyped_storage())
        ...     return memory[: x.numel()].sum()  # a kernel that takes the address
        >>> torchop.testing.check(flat_sum, (torch.ones(2, 3),), only="memory.gaps")
        Traceback (most recent call last):
        torchop.testing.OpCheckError: docs::flat_sum: 1 failed ...

    Programs that the process compiled before are compiled again when they run next. If a kernel
    ends the process or never returns, `check` does so too; Python's traceback of a crash names the
    check.

    The idea of the checks of layouts and dtypes is PyTorch's OpInfo.
    """
    started = time.perf_counter()
    left = Budget(budget)
    checks = plan_checks(
        op,
        examples,
        reference=reference,
        seed=seed,
        expected=expected,
        only=only,
        rtol=rtol,
        atol=atol,
    )
    with _report_crashes():
        results = [left.run(each) for each in checks]
    report = report_of(checks, results, time.perf_counter() - started)
    report = dataclasses.replace(report, allow_not_run=allow_not_run)
    if raise_exception and not report.ok:
        raise optests.opcheck_error(OpCheckError)(report.in_short())
    return report


@contextlib.contextmanager
def _report_crashes() -> Iterator[None]:
    """Where a kernel ends the process, Python writes where, in which the check is named."""
    was_enabled = faulthandler.is_enabled()
    if not was_enabled:
        faulthandler.enable(2, all_threads=False)
    try:
        yield
    finally:
        if not was_enabled:
            faulthandler.disable()


def report_of(checks: Sequence[Check], results: Sequence[Result], seconds: float) -> CheckReport:
    """The report of the results of some checks of one operator."""
    subject = checks[0].subject
    every = (*results, *unmet({check.name: check.expected for check in checks}, results))
    with restored():
        costs = call_costs(subject)
    return CheckReport(subject.name, str(subject.schema), every, subject.seed, seconds, costs)


def call_costs(subject: Subject, seconds: float = 0.02) -> dict[str, float]:
    """Microseconds for one call of the first example that is accepted, by the way of calling."""
    try:
        (example,) = subject.accepted(most=1)
    except CannotCheck:
        return {}
    args, kwargs = example.copy()
    call = functools.partial(subject.op, *args, **kwargs)
    ways = {
        "torch.ops, inference mode": Way(lambda: call, torch.inference_mode),
        "torch.ops, no_grad": Way(lambda: call, torch.no_grad),
        "torch.ops, grad enabled": Way(lambda: call, torch.enable_grad),
    }
    function = subject.operator.function
    if function is not None and not subject.schema.is_mutable:
        alone = functools.partial(function, *args, **kwargs)
        ways["its Python function, no_grad"] = Way(lambda: alone, torch.no_grad)
    timings = timed(ways, (args, kwargs), seconds)
    return {
        way: round(timing.best, 3) for way, timing in timings.items() if isinstance(timing, Timing)
    }
