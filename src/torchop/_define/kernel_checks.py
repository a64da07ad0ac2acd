"""Kernels of the low level, with checks of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torchop._compat import compilers, torch_ops
from torchop._compat.classes import OpOverload
from torchop._core.checking import checked, follow
from torchop._core.contract import ResultCheck, result_check
from torchop._core.lock import registration_lock
from torchop._core.registry import find_schema
from torchop._native import low_level
from torchop._schema import naming


def checked_kernel(
    qualname: str, function: Callable[..., Any], with_keyset: bool
) -> Callable[..., Any]:
    """Checks what a kernel returns, before PyTorch trusts it to match the schema."""
    name = naming.parse(qualname)
    check: ResultCheck | None = None
    checked_schema: Any = None  # as PyTorch has it; an overload may go to the next operator
    run = function

    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal check, checked_schema, run
        # A kernel may be registered before the operator is defined, and outlive that definition.
        current = torch_ops.existing_overload(*name) or torch_ops.live_overload(*name)
        current_schema = getattr(current, "_schema", None)
        check_now = check
        if check_now is None or current is None or current_schema is not checked_schema:
            schema = find_schema(name)
            with registration_lock:
                run = checked(qualname, schema, function, leading=int(with_keyset))
                check_now = result_check(schema.returns)
                if current is not None:
                    low_level.attach(name, current)
                # Last: a thread that sees the new check must not run the old kernel, and a call
                # that is interrupted leaves the rest to the next one.
                check, checked_schema = check_now, current_schema
        return check_now(run(*args, **kwargs), qualname)

    def outdate_plan() -> None:
        nonlocal check
        check = None
        low_level.outdate(name)

    vars(kernel)["outdate_plan"] = outdate_plan
    follow(cast(Any, kernel))
    if not with_keyset:
        vars(kernel)[low_level.KERNEL_ATTRIBUTE] = function
    return kernel


def checked_fallback(function: Callable[..., Any], with_keyset: bool) -> Callable[..., Any]:
    """The same for a fallback, the kernel of all operators without one."""

    @compilers.never_traced
    def kernel(*args: Any, **kwargs: Any) -> Any:
        op: OpOverload = args[1 if with_keyset else 0]
        check = result_check(tuple(str(result.real_type) for result in op._schema.returns))
        return check(function(*args, **kwargs), op._name, "fallback")

    return kernel
