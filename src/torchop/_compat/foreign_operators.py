"""Query other packages' operators: which library defined an operator, and how PyTorch calls it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.library

from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._compat.overload_functions import follow_overloads

# The method of an OpOverload that switches (below: exchanges) its calls from dispatch in C++ to
# dispatch in Python. Afterwards, the attribute `_pyobj_dispatcher` is not None.
_EXCHANGE = "_enable_pyobj_dispatch"
_DISPATCHER = "_pyobj_dispatcher"


def defining_libraries() -> dict[str, torch.library.Library]:
    """Map each operator's name to the library that defined the operator.

    PyTorch has no list of libraries. But `Library.__init__` registers a finalizer, so this searches
    all finalizers. Searching `gc.get_objects` instead would take 50 ms, and would miss objects
    hidden by `gc.freeze`.
    """
    finalizers: Any = weakref.finalize
    defining: dict[str, torch.library.Library] = {}
    for finalizer in tuple(finalizers._registry):
        library: Any = (finalizer.peek() or (None,))[0]
        # Avoid `isinstance`, which reads `__class__`. For a lazy proxy, that would load the proxied
        # object.
        if issubclass(type(library), torch.library.Library):
            defining.update(dict.fromkeys(library._op_defs, library))
    return defining


def watch_definitions(
    on_defined: Callable[[torch.library.Library, str], None],
) -> Callable[[], None]:
    """Call `on_defined(library, name)` after each operator definition through `Library.define`.

    Returns a function that removes the callback.
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
    """Call `hook` once, after PyTorch has switched an overload to dispatching in Python.

    In 2.15, `torch.library.custom_op` first defines the operator, and then switches the overload by
    calling `_enable_pyobj_dispatch`. The switch replaces the overload's function, so `hook` must
    reapply torchop's changes to that function.
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
    """Return whether PyTorch dispatches calls to an overload in Python rather than in C++.

    Since 2.14, PyTorch dispatches operators created by `torch.library.custom_op` in Python. But
    calls to the packet, calls with keyword arguments, and all calls to an operator for which
    `enters_in_cpp` returns True still start in the C++ dispatcher, which then calls the first
    kernel that is a Python function.
    """
    return getattr(overload, _DISPATCHER, None) is not None


def enters_in_cpp(overload: OpOverload) -> bool:
    """Return whether all calls to an overload start in the C++ dispatcher.

    This is the case for overloads with a non-tensor argument, even if `is_dispatched_in_python`
    returns True.
    """
    return not all(
        str(argument.type) in ("Tensor", "List[Tensor]") for argument in overload._schema.arguments
    )


def dispatcher_source(overload: OpOverload) -> tuple[tuple[Any, Any, Any], ...]:
    """Return the attribute that `is_dispatched_in_python` reads, as (dictionary, key, value).

    torchop plans native calls (calls that skip the dispatcher) in advance. The plan is valid only
    while this attribute does not change, so each native call compares the value in the dictionary
    with the recorded value.
    """
    attributes = vars(overload)
    if _DISPATCHER not in attributes:
        return ()
    return ((attributes, _DISPATCHER, attributes[_DISPATCHER]),)


def forget_exchange(overload: OpOverload) -> None:
    vars(overload).pop(_EXCHANGE, None)


def restore_function(overload: OpOverload, operator: Any, entry: Any) -> None:
    """Undo `overload_functions.replace_function`, unless other code has replaced `_op` since."""
    function = overload._op
    if isinstance(function, operator) and function.entry is entry:
        overload._op = function.dispatch
    follow_overloads(overload._overloadpacket, operator)


def returns_what_it_writes(handle: CustomOpDef) -> bool:
    """Return whether `custom_op` requires the operator to return the arguments that it mutates."""
    return getattr(handle, "_is_inplace", False) or getattr(handle, "_is_out", False)


def handle_calls_forward() -> bool:
    """Return whether `CustomOpDef.__call__` does nothing but call the OpOverload.

    The method may do more in another release of PyTorch, or after a user has patched it, so check
    that the code of `__call__` uses no name other than `_opoverload`.
    """
    code = getattr(vars(CustomOpDef)["__call__"], "__code__", None)
    return getattr(code, "co_names", None) == ("_opoverload",)
