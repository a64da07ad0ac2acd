"""A TorchDispatchMode that observes all operator calls without changing their results."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable
from typing import Any, cast

import torch
from torch._library.autograd import make_autograd_impl

from torchop._compat import classes, compilers, dispatch, functorch, operators, registries
from torchop._compat.classes import (
    CustomOpDef,
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    OpOverloadPacket,
    TorchDispatchMode,
)


def observing_mode(
    note: Callable[[str, tuple[Any, ...], dict[str, Any]], Callable[[], None] | None],
) -> contextlib.AbstractContextManager[Any]:
    """Return a mode that calls `note(name, args, kwargs)` before each operator call.

    If `note` returns a function, the mode calls it after the operator has returned. Calls made
    inside Python kernels are observed too. The mode does not affect `torch.compile`.
    """

    class Observing(TorchDispatchMode):
        supports_higher_order_operators = True  # otherwise higher-order operators raise

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            return True

        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            # If this returned True, PyTorch would import Dynamo. `never_traced` below has the same
            # effect, but without the import.
            return False

        @compilers.never_traced
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if isinstance(func, OpOverload):
                name = func._name.removesuffix(".default")
                after = note(name, args, kwargs)
                if _ends_at_python(name, args, kwargs):
                    result = _call_below_modes(cast(Any, self), name, func, args, kwargs)
                else:
                    result = func(*args, **kwargs)
                if after is not None:
                    after()
                return result
            return func(*args, **kwargs)

    return cast("contextlib.AbstractContextManager[Any]", cast(Any, Observing)())


def _tensors_of_call(args: Any, kwargs: Any) -> list[torch.Tensor]:
    leaves = classes.tree_leaves((args, kwargs))
    return [value for value in leaves if isinstance(value, torch.Tensor)]


def _ends_at_python(qualname: str, args: Any, kwargs: Any) -> bool:
    """Return whether the first kernel that the call reaches below this mode is a Python kernel."""
    return (
        operators.is_defined_in_python(qualname)
        and not dispatch.dispatch_modes_are_active()
        and not _is_called_by_a_mode()
        and not functorch.is_active()
        and not any(
            torch._C._dispatch_keys(tensor).has(DispatchKey.Python)
            for tensor in _tensors_of_call(args, kwargs)
        )
    )


def _is_called_by_a_mode() -> bool:
    """Return whether the handler of another mode made the call.

    PyTorch excludes the same dispatch keys in every mode's handler, so the keys do not show which
    handler made the call. Search the call stack instead.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(3)):
        if frame.f_code.co_name == "__torch_dispatch__":
            return frame.f_globals.get("__name__") != __name__
    return False


def _call_below_modes(mode: Any, qualname: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Call the kernel below `mode`, in the thread-local state that it would have without the mode.

    While a mode's handler runs, PyTorch deactivates the mode and excludes all dispatch keys above
    the key Python. If the kernel ran in this state, autocast would be off, autograd would not
    record the operators that the kernel calls, and `mode` would not observe them.
    """
    tensors = _tensors_of_call(args, kwargs)
    keys = dispatch.keyset_of_call(tensors)
    keys = keys & torch._C._dispatch_keyset_full_after(DispatchKey.Python)
    # Most operators only have a fallthrough at BackendSelect, and redispatching to a fallthrough
    # fails.
    if not dispatch.has_kernel(qualname, "BackendSelect"):
        keys = keys.remove(DispatchKey.BackendSelect)
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        excluded = _excluded_below_kernels(qualname, tensors)
        with mode:
            included = torch._C._dispatch_tls_local_include_set()
            if included.has(DispatchKey.ADInplaceOrView) and _excludes_versions(qualname):
                excluded = excluded.add(DispatchKey.ADInplaceOrView)
            with torch._C._ForceDispatchKeyGuard(included, excluded):
                return dispatch.redispatch(func, keys, args, kwargs)


def _excluded_below_kernels(qualname: str, tensors: list[torch.Tensor]) -> DispatchKeySet:
    """Return the dispatch keys that the autocast and autograd kernels of a call would exclude.

    Call this in the thread-local state in which the operator was called.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    for key, name in dispatch.in_order(dispatch.keyset_of_call(tensors)):
        registered = dispatch.registered_key(qualname, name)
        if registered is None or dispatch.falls_through(qualname, registered):
            continue
        if name.startswith("Autocast"):
            excluded = excluded.add(key)
        elif name.startswith("Autograd"):
            excluded = excluded | _EXCLUDED_BELOW_AUTOGRAD
    return excluded


# The keys that `autograd.below_autograd` (AutoDispatchBelowAutograd) excludes.
_EXCLUDED_BELOW_AUTOGRAD = (
    DispatchKeySet(DispatchKey.AutogradFunctionality)
    | DispatchKeySet(DispatchKey.AutogradOther)
    | DispatchKeySet(DispatchKey.AutogradNestedTensor)
)


def _excludes_versions(qualname: str) -> bool:
    """Return whether an operator's ADInplaceOrView kernel excludes this key when it redispatches.

    ADInplaceOrView kernels bump version counters. In 2.11, the kernels that
    `torch.library.custom_op` registers at this key exclude it.
    """
    made_by_handle = hasattr(CustomOpDef, "_register_mutation_version_bump")
    is_stock = type(registries.published_handle(qualname)) is CustomOpDef
    return is_stock and not made_by_handle and dispatch.has_kernel(qualname, "ADInplaceOrView")


_CALLS = (OpOverload.__call__.__code__, OpOverloadPacket.__call__.__code__)


def records_gradient(module_of_formulas: str) -> bool:
    """Return whether autograd records the call that a mode is handling, through a backward formula.

    Autograd is always disabled inside a mode's handler, so its state does not answer this question.
    Instead, search the call stack for the `forward` of an `autograd.Function`, which is defined in
    `module_of_formulas` or in torch/_library/autograd.py.
    """
    if torch.is_grad_enabled():
        return True
    formulas = (make_autograd_impl.__module__, module_of_formulas)
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code in _CALLS:
            return False
        module = frame.f_globals.get("__name__", "")
        if module in formulas and frame.f_code.co_name == "forward":
            return True
        if module.partition(".")[0] not in ("torch", "torchop"):
            return False
    return False
