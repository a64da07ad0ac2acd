"""The kernels of an operator that somebody else registered, and what native calls run for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torchop._accelerate import gradients
from torchop._accelerate.results import conversion
from torchop._compat import dispatch, overload_functions, registries, stock_kernels
from torchop._compat.classes import OpOverload
from torchop._native import low_level
from torchop._native.plan import Finish, mutated_parameters
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

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
        must_return = self.stock and registries.returns_what_it_writes(self.stock.definition)
        return mutated_parameters(schema) if must_return else ()

    def finish(
        self, name: OpName, schema: Schema, overload: OpOverload
    ) -> tuple[Finish, Callable[[Any], Any] | None]:
        """The function that checks and converts results that are not just fresh tensors.

        Where PyTorch dispatches in Python, a kernel's result is returned unchanged. Only calls
        through the C++ dispatcher convert it at the end.
        """
        convert = conversion(str(name), schema)
        check = _unchecked if self.stock is None else self.stock.check
        if overload_functions.is_dispatched_in_python(overload):
            if not overload_functions.enters_in_cpp(overload):
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
