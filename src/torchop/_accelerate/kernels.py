"""The kernels of an operator that somebody else registered, what native calls run for them, and how
their results are converted as the dispatcher does.
"""

from __future__ import annotations

import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torchop._accelerate import gradients
from torchop._compat import (
    dispatch,
    foreign_operators,
    libraries,
    stock_kernels,
    torch_ops,
)
from torchop._core.library import process_library
from torchop._native import low_level
from torchop._native.plan import Finish
from torchop._schema.schema import OBJECTS
from torchop._schema.text import results_of, without_aliases, write_results
from torchop.extend import OpName, OpOverload, Schema

# Where a kernel at a backend may have been registered. A fallback for all operators is elsewhere.
_COMPOSITE = (
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
_NO_KERNEL = "none of its kernels is a Python function"
_UNKNOWN_AUTOGRAD = "its autograd kernel is not the one that custom_op registered"


class Kernels(NamedTuple):
    """The kernels of one operator that native calls may run."""

    # (function in the dispatcher's table, function to call)
    pairs: tuple[tuple[Callable[..., Any], Callable[..., Any]], ...] = ()
    sources: tuple[tuple[Any, Any, Any], ...] = ()  # where the latter were read: see `StockKernel`
    # The last one that `custom_op` of `torch.library` made; None if it made none of them.
    stock: stock_kernels.StockKernel | None = None

    def returned_parameters(self, schema: Schema) -> tuple[int, ...]:
        """The positions of the parameters that `custom_op` requires a kernel to return."""
        must_return = self.stock and foreign_operators.returns_what_it_writes(self.stock.definition)
        return tuple(i for i, _ in schema.mutated_places) if must_return else ()

    def finish(
        self, name: OpName, schema: Schema, overload: OpOverload
    ) -> tuple[Finish, Callable[[Any], Any] | None]:
        """The function that checks and converts results that are not just fresh tensors.

        Where PyTorch dispatches in Python, a kernel's result is returned unchanged. Only calls
        through the C++ dispatcher convert it at the end.
        """
        convert = _conversion(str(name), schema)
        check = _unchecked if self.stock is None else self.stock.check
        if foreign_operators.is_dispatched_in_python(overload):
            if not foreign_operators.enters_in_cpp(overload):
                return check, convert
            return lambda args, kwargs, result: convert(check(args, kwargs, result)), None
        if self.stock is None:
            return lambda args, kwargs, result: convert(result), None
        # A call returns through two or more kernels. The first may change a result, such as a tuple
        # that is too short, and the second may then refuse it.
        return lambda args, kwargs, result: convert(convert(check(args, kwargs, result))), None


def _unchecked(args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
    return result


def find_kernels(native: Any, name: OpName, overload: OpOverload) -> tuple[Kernels, str | None]:
    """The kernels that the dispatcher has now; and why no call is native, if none is."""
    stock: list[tuple[Any, stock_kernels.StockKernel]] = []
    plain: list[Any] = []
    seen: list[Any] = []
    problem = None
    for backend in native.backends:
        kernel = native.python_kernel(name.packet, name.overload, backend)
        if kernel is None and dispatch.has_kernel(str(name), backend):
            problem = (
                problem
                or f"its kernel for {dispatch.spelled_key(backend)} is not a Python function"
            )
        if kernel is None or any(other is kernel for other in seen):
            continue
        seen.append(kernel)
        recognized = stock_kernels.recognize(kernel, overload)
        if recognized is not None:
            stock.append((kernel, recognized))
        elif (reason := _why_not(native, name, backend, kernel)) is not None:
            problem = problem or reason
        else:
            plain.append(kernel)
    if stock:
        # Without the plain kernels, because they do not have the checks of custom_op, which a plan
        # makes for all.
        problem = None if gradients.knows_autograd(native, name, overload) else _UNKNOWN_AUTOGRAD
        pairs = tuple((kernel, inside.function) for kernel, inside in stock)
        sources = tuple(source for _, inside in stock for source in inside.sources)
        return Kernels(pairs, sources, stock[-1][1]), problem
    plain += _at_autograd(native, name, overload, plain)
    pairs = tuple((kernel, stock_kernels.below_impl(kernel)) for kernel in plain)
    return Kernels(pairs), None if pairs else problem or _NO_KERNEL


def version_counter(native: Any, name: OpName, overload: OpOverload) -> Any:
    """The kernel that counts versions, if it is PyTorch's."""
    kernel = native.python_kernel(name.packet, name.overload, "ADInplaceOrView")
    return kernel if stock_kernels.counts_versions_as_stock(kernel, overload) else None


def _why_not(native: Any, name: OpName, backend: str, kernel: Any) -> str | None:
    if hasattr(kernel, low_level.KERNEL_ATTRIBUTE):
        return "its kernel was registered with torchop, so its calls are native already"
    spelled = dispatch.spelled_key(backend)
    if not any(dispatch.has_kernel(str(name), key) for key in (backend, *_COMPOSITE)):
        return f"a fallback for all operators is registered instead of a kernel for {spelled}"
    if not native.is_plain_kernel(name.packet, name.overload, backend):
        return f"its kernel for {spelled} takes dispatch keys"
    if stock_kernels.is_made_by_custom_op(kernel):
        return f"its kernel for {spelled} is not the one that custom_op registered"
    return None


def _at_autograd(native: Any, name: OpName, overload: OpOverload, below: list[Any]) -> list[Any]:
    """Kernels that somebody registered at Autograd; a call ends there if no kernel is below."""
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
    """The conversion that the dispatcher applies to results of a Python kernel of this operator.

    PyTorch converts or refuses results that do not have exactly the types of the schema.
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
            # PyTorch converts all of them, with types from behind the end of the schema's.
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
    """Lets PyTorch check and convert a result: an operator with the same results returns it."""
    identity = _identity(form)
    _passing.result = result
    try:
        return identity()
    except RuntimeError as error:
        # The message may name that operator, but the caller called another.
        message = re.sub(rf"{_NAMESPACE}::as_\d+", name, str(error))
        if message == str(error):
            raise
        raise type(error)(message) from None
    finally:
        del _passing.result


@functools.cache
def _identity(form: str) -> Callable[[], Any]:
    """An operator with results of one form, made for the first unusual result of that form."""
    library, local = process_library(_NAMESPACE), f"as_{next(_numbers)}"
    libraries.define(library, f"{local}() -> {form}", ())
    libraries.implement(library, local, "CompositeExplicitAutograd", lambda: _passing.result)
    return torch_ops.lookup_overload(_NAMESPACE, local, "")
