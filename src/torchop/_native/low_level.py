"""Native calls of operators that were defined and implemented at the low level."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchop._compat import handles, operators, overload_functions, torch_ops
from torchop._compat.classes import OpOverload
from torchop._core.checking import checked
from torchop._core.contract import ResultCheck
from torchop._core.lock import registration_lock
from torchop._native import switch
from torchop._native.plan import converting, described, is_returnable
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

if TYPE_CHECKING:
    from torchop._native._call_path import Entry

# The devices whose tensors a native call takes.
BACKENDS = ("CPU", "CUDA", "XPU", "MPS")

# Take an operator back from whoever made it native before a kernel of ours was registered for it.
releasing: list[Callable[[OpName], None]] = []

# What `Library.impl` registers is a wrapper that checks results; this is the function inside.
KERNEL_ATTRIBUTE = "_torchop_kernel"


def attach(name: OpName, overload: OpOverload, schema: Schema, check: ResultCheck) -> None:
    """Makes calls of an overload native where they end at a kernel of ours.

    Called when a kernel first runs: by then the operator is whole, and used. It is called again for
    a kernel that came later, which the plan does not know.
    """
    native = switch.native_module()
    # An operator of PyTorch's own, in which somebody overrides a kernel, stays as it is.
    if native is None or not operators.is_defined_in_python(str(name)):
        return
    if handles.published_handle(str(name)) is not None:
        return
    with registration_lock:
        for release in releasing:
            release(name)
        known = entry_of(name)
        if known is not None:
            known.plan = None
            return
        refresh = functools.partial(_make_plan, native, name, schema, check)
        entry = native.Entry(name.packet, refresh)
        entry.dispatch = overload_functions.replace_function(overload, native.Operator, entry)
        # The entry keeps itself current: `refresh` leaves the plan where calls find it.
        refresh.keywords["entry"] = entry


def entry_of(name: OpName) -> Entry | None:
    """Where native calls of an operator come in that has no handle, if there are any."""
    native, overload = switch.native_module(), torch_ops.existing_overload(*name)
    if native is None or overload is None:
        return None
    function = overload_functions.replaced_function(overload)
    return function.entry if isinstance(function, native.Operator) else None


def outdate(name: OpName) -> None:
    """Makes the next native call of an operator compile a new plan."""
    entry = entry_of(name)
    if entry is not None:
        entry.plan = None


def registered_here(native: Any, name: OpName) -> dict[Any, Callable[..., Any]]:
    """What `Library.impl` was given for an operator, by the kernel that it made of it."""
    found = (native.python_kernel(name.packet, name.overload, key) for key in BACKENDS)
    return {
        kernel: getattr(kernel, KERNEL_ATTRIBUTE)
        for kernel in found
        if hasattr(kernel, KERNEL_ATTRIBUTE)
    }


def _make_plan(
    native: Any, name: OpName, schema: Schema, check: ResultCheck, *, entry: Entry
) -> None:
    with registration_lock:
        entry.plan = native.Plan(
            **described(name, schema),
            kernels=tuple(
                (kernel, checked(name, schema, function))
                for kernel, function in registered_here(native, name).items()
                if is_returnable(schema)
            ),
            own_kernels=(None, None, None),
            returned_parameters=(),
            are_fresh=False,  # nothing is promised at the low level
            gradient=None,
            finish=converting(lambda args, kwargs, result: check(result, name), schema),
            as_dispatched=True,
        )
