"""Operators that others define: by which library, and how their calls are taken and given back."""

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
    """The library that defined each operator, by the operator's name, if it still exists.

    PyTorch keeps no list of libraries, but each has a finalizer. A search through all objects would
    take some 50 ms, and miss those that `gc.freeze` hides.
    """
    finalizers: Any = weakref.finalize
    defining: dict[str, torch.library.Library] = {}
    for finalizer in tuple(finalizers._registry):
        library: Any = (finalizer.peek() or (None,))[0]
        # Not isinstance, for which a lazy proxy would load its object.
        if issubclass(type(library), torch.library.Library):
            defining.update(dict.fromkeys(library._op_defs, library))
    return defining


def watch_definitions(
    on_defined: Callable[[torch.library.Library, str], None],
) -> Callable[[], None]:
    """Calls `on_defined(library, name)` after each definition by a library; returns the undoing."""

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
    """Calls `hook` after PyTorch puts another function into an overload; at most once.

    On 2.15, `custom_op` does that after it has defined the operator, which then dispatches without
    leaving Python.
    """
    exchange = getattr(overload, _EXCHANGE, None)
    if exchange is None or is_dispatched_in_python(overload):
        return

    def exchange_and_tell(*args: Any, **kwargs: Any) -> None:
        forget_exchange(overload)
        exchange(*args, **kwargs)
        hook()

    vars(overload)[_EXCHANGE] = exchange_and_tell


def is_dispatched_in_python(overload: OpOverload) -> bool:
    """Whether PyTorch dispatches calls of an overload without leaving Python.

    It can since 2.14, and does it with the operators of `torch.library.custom_op`. Calls of the
    packet, calls with keywords and those of `enters_in_cpp` come to the dispatcher in C++, and
    leave it at their first kernel in Python.
    """
    return getattr(overload, _DISPATCHER, None) is not None


def enters_in_cpp(overload: OpOverload) -> bool:
    """Whether every call comes to the dispatcher in C++, as it takes more than plain tensors."""
    return not all(
        str(argument.type) in ("Tensor", "List[Tensor]") for argument in overload._schema.arguments
    )


def dispatcher_source(overload: OpOverload) -> tuple[tuple[Any, Any, Any], ...]:
    """Where that was read, as the source of a plan: (dictionary, key, value)."""
    attributes = vars(overload)
    if _DISPATCHER not in attributes:
        return ()
    return ((attributes, _DISPATCHER, attributes[_DISPATCHER]),)


def forget_exchange(overload: OpOverload) -> None:
    """Undoes `when_exchanged`."""
    vars(overload).pop(_EXCHANGE, None)


def take_back_function(overload: OpOverload, operator: Any, entry: Any) -> None:
    """Undoes `replace_function`, if nobody has replaced the function since."""
    function = overload._op
    if isinstance(function, operator) and function.entry is entry:
        overload._op = function.dispatch
    follow_overloads(overload._overloadpacket, operator)


def returns_what_it_writes(handle: CustomOpDef) -> bool:
    """Whether `custom_op` requires an operator to return what it mutates."""
    return getattr(handle, "_is_inplace", False) or getattr(handle, "_is_out", False)


def handle_calls_forward() -> bool:
    """Whether calling a handle of torch.library only calls its overload."""
    code = getattr(vars(CustomOpDef)["__call__"], "__code__", None)
    return getattr(code, "co_names", None) == ("_opoverload",)
