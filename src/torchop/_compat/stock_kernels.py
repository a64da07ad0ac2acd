"""Recognize the kernels and backward formulas that `torch.library` creates.

Native calls (calls that skip the dispatcher) run the user's functions directly instead of PyTorch's
wrappers around them. To find the user's functions, this module looks into the closures of the
wrappers. It recognizes a wrapper only if its code is exactly the code of the installed PyTorch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.library
from torch._compile import _disable_dynamo
from torch._library.autograd import make_autograd_impl, not_list_of_tensor, supports_tensorlist
from torch.utils._pytree import tree_flatten

from torchop._compat.classes import CustomOpDef, OpOverload


class StockKernel(NamedTuple):
    """A kernel that `torch.library.custom_op` created, and the user's function inside it.

    Attributes:
        definition: the operator's handle.
        function: the user's function for the device type. It is valid while `sources` are
            unchanged.
        sources: the containers in which `function` was found. Each is (dictionary, key, value) or
            (set, key, whether the set contains the key).
        check: `check(args, kwargs, result)` checks a result in the same way as the kernel.
    """

    definition: CustomOpDef
    function: Callable[..., Any]
    sources: tuple[tuple[Any, Any, Any], ...]
    check: Callable[[tuple[Any, ...], dict[str, Any], Any], Any]


def recognize(kernel: Any, overload: OpOverload) -> StockKernel | None:
    """Return the user's function in `kernel` if `custom_op` created the kernel, otherwise None."""
    around: Any = made_by(kernel, CustomOpDef.register_kernel, "inner", "backend_impl")
    if around is None or around.keys() != {"device_type", "self"}:
        return None
    definition, device = around["self"], around["device_type"]
    if not isinstance(definition, CustomOpDef) or definition._opoverload is not overload:
        return None
    if device is not None and type(device) is not str:
        return None  # a member of a str enum may have a `__hash__` that a user wrote
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
    """Check the result of a user's function in the same way as PyTorch's kernel does.

    PyTorch's kernel calls the user's function, and then checks the result. To run only the check,
    this function runs the code of the kernel with a function that just returns `result` in place of
    the user's function.
    """
    returned = functools.update_wrapper(lambda *args, **kwargs: result, wrapped)
    cells = {"device_type": device, "self": _WithOtherKernels(definition, {device: returned})}
    closure = tuple(CellType(cells[name]) for name in kernel.__code__.co_freevars)
    check = FunctionType(kernel.__code__, kernel.__globals__, "backend_impl", None, closure)
    return check(*args, **kwargs)


class _WithOtherKernels:
    """A proxy for a `CustomOpDef` that has different kernels.

    All other attributes are forwarded to the original `CustomOpDef`.
    """

    def __init__(self, definition: CustomOpDef, functions: Mapping[str | None, Any]) -> None:
        self._definition = definition
        self._backend_fns = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self._definition, name)


def is_made_by_custom_op(kernel: Any) -> bool:
    return made_by(kernel, CustomOpDef.register_kernel, "inner", "backend_impl") is not None


def counts_versions_as_stock(kernel: Any, overload: OpOverload) -> bool:
    """Return whether `kernel` is the kernel of `custom_op` that bumps version counters.

    The kernel must have been created for `overload`. Before 2.13, this is always False, because
    `custom_op` used a different kernel, which bumped each counter twice.
    """
    maker = getattr(CustomOpDef, "_register_mutation_version_bump", None)
    around = made_by(kernel, maker, "adinplaceorview_impl") or {}
    return around.get("op") is overload and around.get("is_view") is False


def below_impl(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Return the user's function inside the wrapper that `torch.library.impl` adds for Dynamo."""
    untraced = made_by(kernel, _disable_dynamo, "inner") or {}
    inside = made_by(untraced.get("fn"), _torch_library_impl, "register_", "func_no_dynamo") or {}
    return cast("Callable[..., Any]", inside.get("func", kernel))


_torch_library_impl: Any = getattr(torch.library, "_impl", None)


def made_by(function: Any, maker: Any, *names: str) -> dict[str, Any] | None:
    """Return a function's closure variables by name, if `maker` created the function.

    `names` is the path of nested functions from `maker` down to `function`. Returns None if
    `function` does not have the code of the last function on this path.
    """
    code = _code_inside(maker, *names)
    if (
        code is None
        or not isinstance(function, FunctionType)
        or function.__code__ is not code
        or function.__globals__ is not maker.__globals__
        or function.__defaults__ is not None
        or function.__kwdefaults__ is not None
    ):
        return None
    variables = {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # unassigned variable
            variables[name] = cell.cell_contents
    return variables


def _code_inside(function: Any, *names: str) -> CodeType | None:
    code: CodeType | None = getattr(function, "__code__", None)
    for name in names:
        constants = code.co_consts if code is not None else ()
        codes = [c for c in constants if isinstance(c, CodeType) and c.co_name == name]
        code = codes[0] if len(codes) == 1 else None
    return code


# The closure variable that holds PyTorch's class for the metadata of lists. In 2.11, the variable
# has the second name.
_METADATA = ("TensorListMetadata", "Metadata")


class StockFormula(NamedTuple):
    """The user's functions in an Autograd kernel of torch.library, and how the kernel calls them.

    torch.library creates such a kernel even without a backward formula. `takes_keywords` is true if
    `setup_context` also receives the keyword-only arguments. `sources` are the containers in which
    `setup_context` was found, as in `StockKernel`. For operators with tensor lists,
    `note_lists(args)` flattens the arguments. It returns the flat list, and a function that
    computes `ctx._pt_metadata` from the operator's result.
    """

    function: Any
    setup_context: Callable[..., Any] | None
    takes_keywords: bool
    sources: tuple[tuple[Any, Any, Any], ...]
    note_lists: Callable[[tuple[Any, ...]], tuple[list[Any], Callable[[Any], Any]]] | None


def recognize_formula(kernel: Any, overload: OpOverload) -> StockFormula | None:
    """Return the user's functions in an Autograd kernel if torch.library created the kernel."""
    maker = make_autograd_impl
    around = made_by(kernel, maker, "autograd_impl") or {}
    # The nested function has the first name up to 2.13, and the second name in 2.15. Since 2.13,
    # the closure of `autograd_impl` also contains the operator.
    names = ("forward_no_grad", "redispatch_no_grad")
    plain = next((made_by(around[name], maker, name) for name in names if name in around), None)
    if (plain or {}).get("op") is not overload or around.get("op", overload) is not overload:
        return None
    function = around["Generated"]
    spread = {
        name: (made_by(getattr(function, name), supports_tensorlist, f"new_{name}") or {})
        for name in ("forward", "backward", "apply")
    }
    takes_lists = all(spread.values())
    original = {
        name: spread[name][f"orig_{name}"] if takes_lists else getattr(function, name)
        for name in ("forward", "backward")
    }
    forward, backward = (made_by(original[name], maker, name) for name in original)
    if forward is None or backward is None:
        return None
    info = forward["info"]
    attributes = vars(info)
    setup_context = attributes.get("_setup_context_fn")
    sources = ((attributes, "_setup_context_fn", setup_context),)
    if forward["op"] is not overload or backward["info"] is not info:
        return None
    note_lists = None
    if takes_lists:
        metadata = next(spread["apply"][n] for n in _METADATA if n in spread["apply"])
        note_lists = functools.partial(_note_lists, metadata)
    return StockFormula(
        function, setup_context, forward["has_kwarg_only_args"], sources, note_lists
    )


def backward_function(qualname: str) -> Callable[..., Any] | None:
    """Return the function passed to the last `torch.library.register_autograd` of an operator.

    PyTorch stores the function only in the closure of a generated `autograd.Function`, which it
    names after the operator (torch/_library/autograd.py).
    """
    namespace, _, name = qualname.partition("::")
    packet, _, overload = name.partition(".")
    generated = f"GeneratedBackwardFor_{namespace}_{packet}_{overload or 'default'}"
    for function in reversed(torch.autograd.Function.__subclasses__()):
        if function.__name__ == generated:
            spread = made_by(function.backward, supports_tensorlist, "new_backward") or {}
            backward = spread.get("orig_backward", function.backward)
            around = made_by(backward, make_autograd_impl, "backward")
            if around is not None:
                found: Callable[..., Any] | None = around["info"]._backward_fn
                return found
    return None


def _note_lists(metadata: Any, args: tuple[Any, ...]) -> tuple[list[Any], Callable[[Any], Any]]:
    """Flatten tensor lists, and record how to restore them, as torch/_library/autograd.py does."""
    # `forward` takes an extra argument after the operator's arguments, and the metadata must
    # include it, so append None.
    flat, inputs = tree_flatten((*args, None), not_list_of_tensor)

    def of_result(result: Any) -> Any:
        is_tuple = isinstance(result, tuple)
        _, outputs = tree_flatten(result if is_tuple else (result,), not_list_of_tensor)
        return metadata(inputs, outputs, is_tuple)

    return flat, of_result


# The attributes of a handle that store registered functions, with the role of each function.
_ROLES = {
    "_init_fn": "kernel",
    "_backend_fns": "kernel",
    "_abstract_fn": "fake kernel",
    "_backward_fn": "backward",
    "_setup_context_fn": "setup_context",
    "_vmap_fn": "vmap rule",
}


def registered_functions(handle: CustomOpDef) -> Iterator[tuple[str, Any]]:
    for attribute, role in _ROLES.items():
        value = getattr(handle, attribute, None)
        yield from ((role, each) for each in (value.values() if type(value) is dict else [value]))
