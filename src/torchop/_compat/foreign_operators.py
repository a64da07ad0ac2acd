"""Support operators that torchop did not define: find their library, and intercept calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.library

from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._compat.overload_functions import follow_overloads

_EXCHANGE = "_enable_pyobj_dispatch"
_DISPATCHER = "_pyobj_dispatcher"


def defining_libraries() -> dict[str, torch.library.Library]:
    """Return the library that defined each operator, by operator name.

    PyTorch has no list of libraries, but `Library.__init__` registers a finalizer, so this searches
    the finalizers. Searching `gc.get_objects` would take 50 ms, and miss objects hidden by
    `gc.freeze`.
    """
    finalizers: Any = weakref.finalize
    defining: dict[str, torch.library.Library] = {}
    for finalizer in tuple(finalizers._registry):
        library: Any = (finalizer.peek() or (None,))[0]
        # Do not use `isinstance`: it reads `__class__`, which would load lazy proxies.
        if issubclass(type(library), torch.library.Library):
            defining.update(dict.fromkeys(library._op_defs, library))
    return defining


def watch_definitions(
    on_defined: Callable[[torch.library.Library, str], None],
) -> Callable[[], None]:
    """Call `on_defined(library, name)` after each `Library.define`.

    Returns a function that removes the hook.
    """

    @functools.wraps(torch.library.Library.define)
    def define(self: Any, schema: str, *args: Any, **kwargs: Any) -> Any:
        result = before(self, schema, *args, **kwargs)
        on_defined(self, f"{self.ns}::{schema.split('(')[0].strip()}")
        return result

    cls: Any = torch.library.Library
    before = cls.define
    cls.define = define

    def stop() -> None:
        if cls.define is define:
            cls.define = before

    return stop


def when_exchanged(overload: OpOverload, hook: Callable[[], None]) -> None:
    """Call `hook` once, after PyTorch has enabled Python dispatch for an overload.

    In 2.15, `custom_op` enables it (`_enable_pyobj_dispatch`) after it has defined the operator.
    """
    exchange = getattr(overload, _EXCHANGE, None)
    if exchange is None or is_dispatched_in_python(overload):
        return

    def exchange_and_notify(*args: Any, **kwargs: Any) -> None:
        forget_exchange(overload)
        exchange(*args, **kwargs)
        hook()

    vars(overload)[_EXCHANGE] = exchange_and_notify


def is_dispatched_in_python(overload: OpOverload) -> bool:
    """Return whether PyTorch dispatches calls to an overload without the C++ dispatcher.

    Since 2.14, it does so for operators created by `torch.library.custom_op`. Calls to the packet,
    calls with keyword arguments, and calls to operators where `enters_in_cpp` is true still start
    in the C++ dispatcher, and leave it at the first Python kernel.
    """
    return getattr(overload, _DISPATCHER, None) is not None


def enters_in_cpp(overload: OpOverload) -> bool:
    """Return whether all calls start in the C++ dispatcher, because of a non-tensor argument."""
    return not all(
        str(argument.type) in ("Tensor", "List[Tensor]") for argument in overload._schema.arguments
    )


def dispatcher_source(overload: OpOverload) -> tuple[tuple[Any, Any, Any], ...]:
    """Return the attribute that `is_dispatched_in_python` reads, as (dictionary, key, value).

    A call plan is invalid once the value changes.
    """
    attributes = vars(overload)
    if _DISPATCHER not in attributes:
        return ()
    return ((attributes, _DISPATCHER, attributes[_DISPATCHER]),)


def forget_exchange(overload: OpOverload) -> None:
    """Undo `when_exchanged`."""
    vars(overload).pop(_EXCHANGE, None)


def restore_function(overload: OpOverload, operator: Any, entry: Any) -> None:
    """Undo `replace_function`, unless the function was replaced again."""
    function = overload._op
    if isinstance(function, operator) and function.entry is entry:
        overload._op = function.dispatch
    follow_overloads(overload._overloadpacket, operator)


def returns_what_it_writes(handle: CustomOpDef) -> bool:
    """Return whether `custom_op` requires this operator to return the arguments that it mutates."""
    return getattr(handle, "_is_inplace", False) or getattr(handle, "_is_out", False)


def handle_calls_forward() -> bool:
    """Return whether `CustomOpDef.__call__` does nothing but call the overload."""
    code = getattr(vars(CustomOpDef)["__call__"], "__code__", None)
    return getattr(code, "co_names", None) == ("_opoverload",)
