"""The function `torchop.testing.check`."""

from __future__ import annotations

import contextlib
import faulthandler
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchop._compat import optests
from torchop.extend import OpLike, short_repr
from torchop.testing._check.report import CheckReport
from torchop.testing._check.run import plan_checks, run_check
from torchop.testing._errors import OpCheckError


def check(
    op: OpLike,
    *examples: Any,
    reference: Callable[..., Any] | None = None,
    seed: int = 0,
    budget: float | None = None,
    allow_not_run: bool = False,
    raise_exception: bool = True,
    only: str | Sequence[str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> CheckReport:
    """Check an operator for many kinds of inputs and uses, starting from a few example calls.

    `check` generates variants of the examples with other memory layouts, sizes, dtypes and values,
    and with arguments that share memory. It compares the results of each variant with a call on
    contiguous copies of the arguments, or with a reference. Gradients are compared with finite
    differences, `vmap` with a loop, and compiled and exported programs with eager mode. Other
    checks detect undeclared writes, leaks, and calls that affect later calls. If a check fails,
    `check` searches for a smaller example that also fails, and prints a program that reproduces
    the failure.

    If the operator has providers (alternative kernels), `check` also compares the kernel of each
    provider with the reference kernel, and verifies the properties that the provider declares.

    Args:
        op: the operator: a handle, `"ns::name"`, `"ns::name.overload"`, an `OpOverload`, or a
            packet with one overload.
        examples: calls, each a tuple of arguments, a dict of arguments, or `(args, kwargs)`. By
            default, the registered examples (`CustomOp.register_examples`). Use small tensors. If
            some tensors of an example require grad, only their gradients are checked; otherwise,
            the gradients of all floating-point and complex arguments are checked.
        reference: a function with the operator's parameters that returns or writes the correct
            values. It is called with contiguous copies of the arguments.
        seed: the seed of random inputs; the same seed generates the same inputs.
        budget: the time limit in seconds. The report lists the checks that did not run in time.
        allow_not_run: whether the report may be `ok` although some checks did not run.
        raise_exception: whether to raise an exception if a check fails. If False, the failures are
            only in the report.
        only: the checks to run: names such as `"memory.gaps"`, last parts of names such as
            `"gaps"`, families such as `"memory"`, or patterns such as `"memory.*"`.
        rtol: the relative tolerance of comparisons; by default, as in `torch.testing.assert_close`.
        atol: the absolute tolerance of comparisons. With `rtol=0, atol=0`, bits are compared.

    Returns:
        A `CheckReport`. Print it to see all outcomes, with reasons.

    Raises:
        MissingRuleError: no examples were passed or registered.
        OpCheckError: a check failed or did not run, or no check could be done.
        TypeError: an example is not a call of the operator, or `budget` is not a number.
        ValueError: an example has no data, `only` matches no check, or `budget` is negative.

    Example:
        >>> import torch, torchop
        >>> @torchop.custom_op("docs::flat_sum", mutates_args=())
        ... def flat_sum(x: torch.Tensor) -> torch.Tensor:
        ...     memory = torch.empty(0).set_(x.untyped_storage())
        ...     return memory[: x.numel()].sum()  # ignores the strides
        >>> torchop.testing.check(flat_sum, (torch.ones(2, 3),), only="memory.gaps")
        Traceback (most recent call last):
        torchop.testing.OpCheckError: docs::flat_sum: 1 failed ...

    `check` runs in the calling process, so a kernel that crashes or hangs takes the whole program
    with it. The traceback of a crash contains the name of the check. To survive crashes, use the
    pytest plugin or `python -m torchop check`, which run the checks in worker processes. `check`
    also calls `torch.compiler.reset`, so compiled functions are recompiled in their next call.

    The checks of layouts and dtypes are modeled on PyTorch's OpInfo.
    """
    started = time.perf_counter()
    end = started + _seconds(budget)
    options = {"reference": reference, "seed": seed, "rtol": rtol, "atol": atol}
    checks = plan_checks(op, examples, only=only, **options)
    with _report_crashes():
        results = tuple(run_check(each, end=end) for each in checks)
    subject = checks[0].subject
    report = CheckReport(
        subject.name,
        str(subject.schema),
        results,
        seed,
        time.perf_counter() - started,
        allow_not_run=allow_not_run,
    )
    if raise_exception and not report.ok:
        raise optests.opcheck_error(OpCheckError)(report.in_short())
    return report


def _seconds(budget: float | None) -> float:
    if not isinstance(budget, int | float | None):
        raise TypeError(
            f"check(..., budget={short_repr(budget)}): budget must be a number of seconds, or None."
        )
    if budget is not None and not budget >= 0:  # also rejects nan
        raise ValueError(
            f"check(..., budget={short_repr(budget)}): budget must be 0 or more seconds, or None."
        )
    return math.inf if budget is None else budget


@contextlib.contextmanager
def _report_crashes() -> Iterator[None]:
    """Make faulthandler print a traceback if a kernel crashes the process.

    `run_check` calls a function that is named after the current check, so the traceback shows which
    check crashed.
    """
    was_enabled = faulthandler.is_enabled()
    if not was_enabled:
        faulthandler.enable(2, all_threads=False)
    try:
        yield
    finally:
        if not was_enabled:
            faulthandler.disable()
