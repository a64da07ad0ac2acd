"""Find the kernels that other packages registered, and convert results as the dispatcher does."""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchop._compat import (
    devices,
    dispatch,
    foreign_operators,
    libraries,
    stock_kernels,
    torch_ops,
)
from torchop._compat.classes import OpOverload
from torchop._core.library import process_library
from torchop._native.plan import Finish
from torchop._native.table import gradients
from torchop._native.table.ours import KERNEL_ATTRIBUTE, Kernels
from torchop._schema.naming import OpName
from torchop._schema.schema import OBJECTS, Schema
from torchop._schema.text import results_of, without_aliases, write_results

# The dispatcher uses a kernel at one of these keys for every backend without a kernel.
_COMPOSITE = (
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
_NO_KERNEL = "none of its kernels is a Python function"
_UNKNOWN_AUTOGRAD = "its autograd kernel is not the one that custom_op registered"


def find_kernels(
    native: Any, name: OpName, overload: OpOverload, schema: Schema
) -> tuple[Kernels, str | None]:
    """Return the operator's Python kernels, and the reason if the dispatcher must run all calls."""
    stock: list[tuple[Any, stock_kernels.StockKernel]] = []
    plain: list[Any] = []
    seen: list[Any] = []
    problem = None
    is_stock_used = False
    types = {"cpu", *(device.type for device in devices.accelerators(devices.accelerator_count()))}
    of_devices = {dispatch.dispatch_key_name(device_type) for device_type in types}
    for backend in native.backends:
        kernel = native.python_kernel(name.packet, name.overload, backend)
        if kernel is None and dispatch.has_kernel(str(name), backend):
            problem = (
                problem or f"its kernel for {dispatch.format_key(backend)} is not a Python function"
            )
        is_stock_used |= backend in of_devices and any(kernel is other for other, _ in stock)
        if kernel is None or any(other is kernel for other in seen):
            continue
        seen.append(kernel)
        recognized = stock_kernels.recognize(kernel, overload)
        if recognized is not None:
            stock.append((kernel, recognized))
            is_stock_used |= backend in of_devices
        elif (reason := _why_not(native, name, backend, kernel)) is not None:
            problem = problem or reason
        else:
            plain.append(kernel)
    # If libraries have replaced the kernels of `torch.library.custom_op` for all devices of this
    # process, native calls (without the dispatcher) run the replacements instead.
    if stock and (is_stock_used or not plain):
        # Leave out kernels that were not created by `torch.library.custom_op`, because they need a
        # different check of results, and a call plan can have only one.
        problem = None if gradients.knows_autograd(native, name, overload) else _UNKNOWN_AUTOGRAD
        return _stock(name, schema, overload, stock), problem
    plain += _at_autograd(native, name, overload, plain)
    pairs = tuple((kernel, stock_kernels.below_impl(kernel)) for kernel in plain)
    finish, convert = _finish(name, schema, overload, None)
    return Kernels(pairs, finish, convert), None if pairs else problem or _NO_KERNEL


def _stock(
    name: OpName,
    schema: Schema,
    overload: OpOverload,
    stock: Sequence[tuple[Any, stock_kernels.StockKernel]],
) -> Kernels:
    latest = stock[-1][1]
    finish, convert = _finish(name, schema, overload, latest)
    must_return = foreign_operators.returns_what_it_writes(latest.definition)
    return Kernels(
        tuple((kernel, inside.function) for kernel, inside in stock),
        finish,
        convert,
        sources=tuple(source for _, inside in stock for source in inside.sources),
        returned_parameters=tuple(i for i, _ in schema.mutated_places) if must_return else (),
        # For operators of `torch.library.custom_op`, PyTorch also checks that no result shares
        # memory with an argument or with another result.
        are_fresh=True,
    )


def _finish(
    name: OpName, schema: Schema, overload: OpOverload, stock: stock_kernels.StockKernel | None
) -> tuple[Finish, Callable[[Any], Any] | None]:
    """Return the functions that check and convert results: `finish` and `convert` of `Kernels`.

    The C++ dispatcher converts results, so native calls, which skip it, must convert them too. But
    results are not converted if PyTorch dispatches a call in Python. So if all calls enter the C++
    dispatcher, `finish` both checks and converts results. If only some calls do, `finish` only
    checks results, and the extension applies `convert` in the calls that would enter the C++
    dispatcher.
    """
    convert = _conversion(str(name), schema)
    check = _unchecked if stock is None else stock.check
    if foreign_operators.is_dispatched_in_python(overload):
        if not foreign_operators.enters_in_cpp(overload):
            return check, convert
        return lambda args, kwargs, result: convert(check(args, kwargs, result)), None
    if stock is None:
        return lambda args, kwargs, result: convert(result), None
    # Convert the result twice, because in the dispatcher the result passes through two kernels: one
    # below Autograd, and one at Autograd. The second conversion may reject the result of the first.
    return lambda args, kwargs, result: convert(convert(check(args, kwargs, result))), None


def _unchecked(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    return result


def version_counter(native: Any, name: OpName, overload: OpOverload) -> Any:
    """Return the kernel that bumps version counters if PyTorch registered it, otherwise None."""
    kernel = native.python_kernel(name.packet, name.overload, "ADInplaceOrView")
    return kernel if stock_kernels.counts_versions_as_stock(kernel, overload) else None


def _why_not(native: Any, name: OpName, backend: str, kernel: Any) -> str | None:
    if hasattr(kernel, KERNEL_ATTRIBUTE):
        return "its kernel was registered with torchop, so its calls are native already"
    spelled = dispatch.format_key(backend)
    if not any(dispatch.has_kernel(str(name), key) for key in (backend, *_COMPOSITE)):
        return f"a fallback for all operators is registered instead of a kernel for {spelled}"
    if not native.is_plain_kernel(name.packet, name.overload, backend):
        return f"its kernel for {spelled} takes dispatch keys"
    if stock_kernels.is_made_by_custom_op(kernel):
        return f"its kernel for {spelled} is not the one that custom_op registered"
    return None


def _at_autograd(native: Any, name: OpName, overload: OpOverload, below: list[Any]) -> list[Any]:
    """Return the Python kernels at Autograd keys that may end a call without redispatching it."""
    kernels: list[Any] = []
    for backend in native.backends:
        kernel = native.python_kernel(name.packet, name.overload, f"Autograd{backend}")
        if (
            kernel is not None
            and native.is_plain_kernel(name.packet, name.overload, f"Autograd{backend}")
            and stock_kernels.recognize_formula(kernel, overload) is None
            and all(other is not kernel for other in (*below, *kernels))
        ):
            kernels.append(kernel)
    return kernels


_NAMESPACE = "_torchop_results"

_numbers = itertools.count()
_passing = threading.local()

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ITEMS: dict[str, tuple[type, ...]] = {
    "Tensor": _PLAIN,
    "Optional[Tensor]": (*_PLAIN, type(None)),
    "float": (float,),
    "bool": (bool,),
    "str": (str,),
}


def _conversion(name: str, schema: Schema) -> Callable[[Any], Any]:
    """Return a function that converts a kernel's result as the dispatcher would.

    The function returns a result of exactly the schema's types unchanged, and lets PyTorch convert
    or reject any other result.
    """
    kinds = schema.returns
    form = write_results([without_aliases(result) for result in results_of(schema.written)])

    def convert(result: Any) -> Any:
        if len(kinds) == 1 and _is_of(kinds[0], result):
            return list(result) if isinstance(result, list) else result
        is_tuple = len(kinds) > 1 and type(result) is tuple and len(result) == len(kinds)
        if is_tuple and all(map(_is_of, kinds, result)):
            return tuple(list(item) if type(item) is list else item for item in result)
        if len(kinds) > 1 and isinstance(result, Sequence) and len(result) > len(kinds):
            # If the kernel returned too many values, raise the error here, because PyTorch would
            # read past the end of the schema's list of return types.
            _by_dispatcher(name, form, result[: len(kinds)])
            raise RuntimeError(
                f"{name}: the kernel returned {len(result)} values, expected the {len(kinds)} of "
                f"the schema, {form}."
            )
        return _by_dispatcher(name, form, result)

    return convert


def _is_of(kind: str, value: Any) -> bool:
    if kind in OBJECTS:
        return True
    if kind == "List[Tensor]":
        return type(value) is list and all(type(item) in _PLAIN for item in value)
    return type(value) in _ITEMS.get(kind, ())


def _by_dispatcher(name: str, form: str, result: Any) -> Any:
    """Let PyTorch check and convert a result, by returning the result from another operator.

    `form` is the part of the schema after the arrow, which has the return types.
    """
    identity = _identity(form)
    _passing.result = result
    try:
        return identity()
    except RuntimeError as error:
        # PyTorch's message names the internal operator, so insert the name of the called operator.
        message = re.sub(rf"{_NAMESPACE}::as_\d+", name, str(error))
        if message == str(error):
            raise
        raise type(error)(message) from None
    finally:
        del _passing.result


@functools.cache
def _identity(form: str) -> Callable[[], Any]:
    """Define an operator with the return types in `form`. Its kernel returns `_passing.result`.

    When the operator is called, the dispatcher checks and converts this result.
    """
    library, local = process_library(_NAMESPACE), f"as_{next(_numbers)}"
    libraries.define(library, f"{local}() -> {form}", ())
    libraries.implement(library, local, "CompositeExplicitAutograd", lambda: _passing.result)
    return torch_ops.lookup_overload(_NAMESPACE, local, "")
