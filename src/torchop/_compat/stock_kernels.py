"""The kernels that `torch.library.custom_op` registers, recognized: the user's function in them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.library
from torch._compile import _disable_dynamo

from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._compat.closures import made_by


class StockKernel(NamedTuple):
    """A kernel of `torch.library.custom_op`: what is around the user's function, and that.

    Attributes:
        definition: the operator's handle.
        function: the user's, for this device, as long as nothing in `sources` changes.
        sources: where that was read: (dictionary, key, value), or (set, key, whether it is in it).
        check: `check(args, kwargs, result)` returns a result, or raises, as the kernel would.
    """

    definition: CustomOpDef
    function: Callable[..., Any]
    sources: tuple[tuple[Any, Any, Any], ...]
    check: Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


def recognize(kernel: Any, overload: OpOverload) -> StockKernel | None:
    """What `custom_op` registered as a kernel of this operator; None if it is anything else."""
    around: Any = made_by(kernel, CustomOpDef.register_kernel, "inner", "backend_impl")
    if around is None or around.keys() != {"device_type", "self"}:
        return None
    definition, device = around["self"], around["device_type"]
    if not isinstance(definition, CustomOpDef) or definition._opoverload is not overload:
        return None
    if device is not None and type(device) is not str:
        return None  # a member of a str enum is looked up by its own hash, which may run anything
    attributes = vars(definition)
    functions, disabled = attributes.get("_backend_fns"), attributes.get("_disabled_kernel")
    if type(functions) is not dict or type(disabled) is not set:
        return None
    wrapped = functions.get(device)
    untraced = made_by(wrapped, _disable_dynamo, "inner") or {}
    inside = made_by(untraced.get("fn"), CustomOpDef.register_kernel, "inner", "wrapped_fn") or {}
    is_its_own = inside.get("self") is definition and inside.get("device_type") == device
    if not is_its_own:
        return None
    is_disabled = device in disabled
    sources: list[tuple[Any, Any, Any]] = [
        (attributes, "_backend_fns", functions),
        (functions, device, wrapped),
        (attributes, "_disabled_kernel", disabled),
        (disabled, device, is_disabled),
    ]
    function = inside["fn"]
    if is_disabled:
        function = attributes["_init_fn"]
        sources.append((attributes, "_init_fn", function))
    check = functools.partial(_stock_check, kernel, definition, device, wrapped)
    return StockKernel(definition, function, tuple(sources), check)


def _stock_check(
    kernel: Any,
    definition: CustomOpDef,
    device: str | None,
    wrapped: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
) -> Any:
    """PyTorch's own code for what is checked of a result, with the result in place of a call."""
    returned = functools.update_wrapper(lambda *args, **kwargs: result, wrapped)
    cells = {"device_type": device, "self": _Computed(definition, {device: returned})}
    closure = tuple(CellType(cells[name]) for name in kernel.__code__.co_freevars)
    check = FunctionType(kernel.__code__, kernel.__globals__, "backend_impl", None, closure)
    return check(*args, **kwargs)


class _Computed:
    """A definition to whoever reads it, but with other kernels."""

    def __init__(self, definition: CustomOpDef, functions: Mapping[str | None, Any]) -> None:
        self._definition = definition
        self._backend_fns = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._definition, name)


def is_made_by_custom_op(kernel: Any) -> bool:
    """Whether `custom_op` of `torch.library` made a kernel, for whatever operator."""
    return made_by(kernel, CustomOpDef.register_kernel, "inner", "backend_impl") is not None


def counts_versions_as_stock(kernel: Any, overload: OpOverload) -> bool:
    """Whether a kernel is the one by which `custom_op` counts versions of what is written."""
    # 2.11 makes it elsewhere, and does not tell there for which operator.
    maker = getattr(CustomOpDef, "_register_mutation_version_bump", None)
    around = made_by(kernel, maker, "adinplaceorview_impl")
    if around is None:  # a view, or not PyTorch's
        return False
    return around.get("op") is overload and around.get("is_view") is False


def below_impl(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The user's function, where `torch.library.impl` put one around it that stops Dynamo."""
    untraced = made_by(kernel, _disable_dynamo, "inner") or {}
    inside = made_by(untraced.get("fn"), _torch_library_impl, "register_", "func_no_dynamo") or {}
    return cast("Callable[..., Any]", inside.get("func", kernel))


_torch_library_impl: Any = getattr(torch.library, "_impl", None)
