"""The hook of `torchop.testing.checking` in kernels and formulas.

Call plans contain checking kernels only while some thread is inside a `checking` block, so other
calls have no overhead. Entering the first block and exiting the last one invalidates all plans.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torchop._core.lock import registration_lock
from torchop._schema.schema import Schema


class Checker(Protocol):
    """Wraps functions for a call plan. The wrappers check calls that are made inside a block."""

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
    """Start or stop checking. The caller must hold `registration_lock`."""
    global checker
    checker = new
    for plan in tuple(_plans):
        plan.outdate_plan()


def recompile_for_checking(plan: _Plan) -> None:
    """Invalidate `plan` whenever checking starts or stops. Only a weak reference is stored."""
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
    """Return the kernel for a call plan: a checking wrapper if any thread is inside a block.

    The wrapper ignores the first `leading` arguments, such as the dispatch keys. The caller must
    hold `registration_lock` until it has stored the plan.
    """
    if checker is None:
        return kernel
    return checker.kernel(name, schema, kernel, leading=leading, is_helper=is_helper)
