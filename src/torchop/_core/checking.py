"""The hook through which `torchop.testing.checking` checks kernels and formulas.

While any thread is inside a `with torchop.testing.checking()` block, call plans wrap each kernel in
a check. Entering the first block and exiting the last one invalidate all call plans, so checking
costs nothing outside of these blocks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torchop._core.lock import registration_lock
from torchop._schema.schema import Schema


class Checker(Protocol):
    """Wraps the functions of a call plan, so that calls in a `checking` block are checked."""

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


# Set while any thread is inside a `checking` block. Guarded by `registration_lock`.
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
    """Register `plan` to be invalidated when checking starts or stops.

    Only a weak reference is stored, so this does not keep the plan alive.
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
    """If any thread is inside a `checking` block, return a wrapper that checks calls to `kernel`.

    Otherwise, return `kernel` itself. The wrapper does not check the first `leading` arguments,
    such as the dispatch keys. The caller must hold `registration_lock` until it has stored the call
    plan that contains the returned function. Otherwise, checking could start or stop in between,
    and the stored plan would already be out of date.
    """
    if checker is None:
        return kernel
    return checker.kernel(name, schema, kernel, leading=leading, is_helper=is_helper)
