"""The hook through which `torchop.testing.checking` checks kernels and backward formulas.

An operator's kernels and other registrations are compiled into a call plan, which each call reads.
While any thread is inside a `with torchop.testing.checking()` block, call plans wrap each kernel in
a check. When the first thread enters such a block and when the last one leaves it, all call plans
are invalidated. So calls outside of these blocks have no overhead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torchop._core.lock import registration_lock
from torchop._schema.schema import Schema


class Checker(Protocol):
    """Wraps kernels and backward formulas, so that calls inside a `checking` block are checked."""

    def kernel(
        self,
        name: object,
        schema: Schema,
        kernel: Callable[..., Any],
        *,
        leading: int,
        is_helper: bool,
    ) -> Callable[..., Any]: ...

    def backward(self, name: object, backward: Callable[..., Any]) -> Callable[..., Any]: ...

    def save(
        self, name: object, schema: Schema, save: Callable[..., None]
    ) -> Callable[..., None]: ...


class _Plan(Protocol):
    def outdate_plan(self) -> None: ...


# Not None while any thread is inside a `checking` block. Guarded by `registration_lock`.
checker: Checker | None = None
_plans: weakref.WeakSet[_Plan] = weakref.WeakSet()


def set_checker(new: Checker | None) -> None:
    """Start checking with `new`, or stop checking if `new` is None.

    The caller must hold `registration_lock`.
    """
    global checker
    checker = new
    for plan in tuple(_plans):
        plan.outdate_plan()


def recompile_for_checking(plan: _Plan) -> None:
    """Register a call plan (the compiled rules) to be invalidated when checking starts or stops.

    The plan is stored as a weak reference, so this does not keep it alive.
    """
    with registration_lock:
        _plans.add(plan)


def checked(
    name: object,
    schema: Schema,
    kernel: Callable[..., Any],
    *,
    leading: int = 0,
    is_helper: bool = False,
) -> Callable[..., Any]:
    """Wrap `kernel` in a check if any thread is inside a `checking` block, or return it unchanged.

    The first `leading` arguments, such as the dispatch keys, are not checked. The caller must hold
    `registration_lock` until it has stored the call plan with the returned function. Without the
    lock, checking could start or stop in between, so the stored plan would be out of date from the
    beginning.
    """
    if checker is None:
        return kernel
    return checker.kernel(name, schema, kernel, leading=leading, is_helper=is_helper)
