"""Native calls of operators that somebody else registered, with `torch.library`.

Nobody tells what these operators consist of, or when that changes. So a plan is made from what the
dispatcher's table holds. A function there is called if it is a plain kernel; what `custom_op` of
`torch.library` puts around a kernel is left out if it is known to be exactly that, since a native
call does the same. Anything else is left to the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torchop._compat import (
    autograd,
    dispatch,
    handles,
    libraries,
    operators,
    overload_functions,
    stock_formulas,
    stock_kernels,
    torch_ops,
)
from torchop._compat.classes import CustomOpDef, OpOverload
from torchop._naming import OpName
from torchop._native import dispatched, low_level, switch
from torchop._native.plan import described
from torchop._native.results import conversion
from torchop._plan import registration_lock
from torchop._schema.schema import Schema

# Where a kernel at a backend may have been registered. A fallback for all operators is elsewhere.
_COMPOSITE = (
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)
_NO_KERNEL = "it has no kernel that is a Python function"
_UNKNOWN_AUTOGRAD = "its kernel for autograd is not as custom_op left it"

_foreign: dict[OpName, ForeignOperator] = {}
_flags_are_known: bool | None = None


class _Kernels(NamedTuple):
    """What native calls may run: (function in the table, function to call)."""

    pairs: list[tuple[Callable[..., Any], Callable[..., Any]]]
    sources: list[tuple[Any, Any, Any]]
    check: Callable[[tuple[Any, ...], dict[str, Any], Any], Any] | None
    definition: CustomOpDef | None


class ForeignOperator:
    """An operator of somebody else's whose calls are native where they can be.

    Attributes:
        name: the operator.
        problem: why no call is native; None if calls are.
    """

    def __init__(self, native: Any, name: OpName, overload: OpOverload) -> None:
        self.name = name
        self.problem: str | None = None
        self._native = native
        self._overload = overload
        self._schema = Schema(operators.registered_schema(name.packet, name.overload))
        self._is_active = True
        self._library: torch.library.Library | None = None
        self.entry = native.Entry(name.packet, self.refresh)
        self._come_in()
        overload_functions.when_exchanged(overload, self._come_in)

    def _come_in(self) -> None:
        """Makes calls of the overload come in here."""
        function = overload_functions.replaced_function(self._overload)
        if overload_functions.is_cpp_function(function):
            # A call in another thread may come as soon as the function is replaced.
            self.entry.dispatch = function
            overload_functions.replace_function(self._overload, self._native.Operator, self.entry)

    def follow(self, library: torch.library.Library | None) -> None:
        """Lets go of the operator when the library that defined it does."""
        if library is not None:
            self._library = library
            libraries.on_close(library, self.let_go)

    def let_go(self) -> None:
        """Puts everything back as it was, where nobody has changed it since."""
        with registration_lock:
            if not self._is_active:
                return
            self._is_active = False
            if _foreign.get(self.name) is self:
                del _foreign[self.name]
            overload_functions.forget_exchange(self._overload)
            overload_functions.take_back_function(self._overload, self._native.Operator, self.entry)
            if self._library is not None:
                libraries.forget_hook(self._library, self.let_go)
            self.problem = "it is not accelerated any more"
            self.entry.plan = None

    def refresh(self) -> None:
        """Makes the plan that calls follow, from what the dispatcher has now."""
        with registration_lock:
            kernels = _Kernels([], [], None, None)
            if self._is_active:
                kernels, self.problem = _find_kernels(self._native, self.name, self._overload)
            plan = self._make_plan(kernels)
            if kernels.pairs and plan.always_dispatches:
                self.problem = "its schema has a type that only the dispatcher converts"
            self.entry.plan = plan

    def _make_plan(self, kernels: _Kernels) -> Any:
        native, name, schema = self._native, self.name, self._schema
        own_autograd, gradient, sources = _autograd(native, name, self._overload, schema)
        return native.Plan(
            **described(name, schema),
            kernels=tuple(
                (kernel, dispatched.as_dispatched(function, schema))
                for kernel, function in kernels.pairs
            ),
            own_kernels=(own_autograd, _version_counter(native, name, self._overload), None),
            returned_parameters=_returned_parameters(kernels.definition, schema),
            are_fresh=kernels.check is not None,  # only custom_op promises that
            gradient=gradient,
            finish=_finish(kernels.check, str(name), schema),
            sources=(*kernels.sources, *sources) if kernels.pairs else (),
            is_foreign=True,
        )


def adopt(name: OpName, library: torch.library.Library | None) -> str | None:
    """Makes calls of an operator native where they can be; returns why they never are.

    Args:
        name: the operator.
        library: the one that defined it, if it is known.
    """
    with registration_lock:
        native = switch.native_module()
        if native is None:
            return "the native call path is not there"
        if not _knows_flags(native):
            return "this PyTorch keeps Python kernels in an unknown way"
        overload = torch_ops.live_overload(*name)
        if overload is None:
            return "it is gone"
        known = _foreign.get(name)
        if known is not None and known._overload is overload:
            return known.problem
        if known is not None:
            known.let_go()
        if low_level.entry_of(name) is not None or low_level.registered_here(native, name):
            return "it was made with torchop, which makes its calls native"
        if not overload_functions.is_cpp_function(overload_functions.replaced_function(overload)):
            return "somebody has replaced the function that its object in torch.ops calls"
        made = ForeignOperator(native, name, overload)
        _foreign[name] = made
        made.follow(library)
        return None


def find(name: OpName) -> ForeignOperator | None:
    """The operator of somebody else's whose calls are native, if this is one."""
    return _foreign.get(name)


def adopted() -> list[OpName]:
    """The names of all of them."""
    return list(_foreign)


def release(name: OpName) -> None:
    """Lets go of an operator, if it is one of these."""
    known = _foreign.get(name)
    if known is not None:
        known.let_go()


low_level.releasing.append(release)


def _knows_flags(native: Any) -> bool:
    global _flags_are_known
    if _flags_are_known is None:
        with libraries.probe_operators() as (plain, with_keys, _):
            _flags_are_known = native.learn_flags(plain, with_keys)
        if (
            _flags_are_known
            and handles.handle_calls_forward()
            and overload_functions.forwarding_classes()
        ):
            native.shorten_handle_calls(CustomOpDef)
    return _flags_are_known


def _find_kernels(native: Any, name: OpName, overload: OpOverload) -> tuple[_Kernels, str | None]:
    """The kernels of one operator, and if there is none, why not."""
    kernels = _Kernels([], [], None, None)
    problem = None
    for backend in low_level.BACKENDS:
        kernel = native.python_kernel(name.packet, name.overload, backend)
        if kernel is None or any(known is kernel for known, _ in kernels.pairs):
            if kernel is None and dispatch.has_kernel(str(name), backend):
                problem = problem or f"its kernel for {backend} is not a Python function"
            continue
        stock = stock_kernels.recognize(kernel, overload)
        why_not = _why_not(native, name, backend, kernel)
        if stock is not None:
            kernels = kernels._replace(check=stock.check, definition=stock.definition)
            kernels.pairs.append((kernel, stock.function))
            kernels.sources.extend(stock.sources)
        elif why_not is not None:
            problem = problem or why_not
        elif kernels.check is None:
            kernels.pairs.append((kernel, stock_kernels.below_impl(kernel)))
    if kernels.check is not None:
        # What custom_op checks, a kernel that somebody put in its place does not.
        pairs = [(k, f) for k, f in kernels.pairs if stock_kernels.is_made_by_custom_op(k)]
        problem = None if _knows_autograd(native, name, overload) else _UNKNOWN_AUTOGRAD
        return kernels._replace(pairs=pairs), problem
    for backend in low_level.BACKENDS:
        kernel = native.python_kernel(name.packet, name.overload, f"Autograd{backend}")
        if (
            kernel is not None
            and native.is_plain_kernel(name.packet, name.overload, f"Autograd{backend}")
            and stock_formulas.recognize(kernel, overload) is None
            and all(known is not kernel for known, _ in kernels.pairs)
        ):
            kernels.pairs.append((kernel, stock_kernels.below_impl(kernel)))
    return kernels, None if kernels.pairs else problem or _NO_KERNEL


def _why_not(native: Any, name: OpName, backend: str, kernel: Any) -> str | None:
    if hasattr(kernel, low_level.KERNEL_ATTRIBUTE):
        return "its kernel was registered with torchop, which makes its calls native"
    if not any(dispatch.has_kernel(str(name), key) for key in (backend, *_COMPOSITE)):
        return f"a fallback for all operators stands where its kernel for {backend} would be"
    if not native.is_plain_kernel(name.packet, name.overload, backend):
        return f"its kernel for {backend} takes dispatch keys"
    if stock_kernels.is_made_by_custom_op(kernel):
        return f"its kernel for {backend} is not as custom_op left it"
    return None


def _knows_autograd(native: Any, name: OpName, overload: OpOverload) -> bool:
    kernel = native.python_kernel(name.packet, name.overload, "AutogradCPU")
    return kernel is None or stock_formulas.recognize(kernel, overload) is not None


def _autograd(
    native: Any, name: OpName, overload: OpOverload, schema: Schema
) -> tuple[Any, tuple[Any, ...] | None, tuple[Any, ...]]:
    """The kernel at Autograd if it is PyTorch's, how to record a gradient, and its sources."""
    kernel = native.python_kernel(name.packet, name.overload, "AutogradCPU")
    formula = None if kernel is None else stock_formulas.recognize(kernel, overload)
    if formula is None:
        return None, None, ()
    if (
        set(schema.returns) != {"Tensor"}
        or not schema.is_functional
        or schema.lists_may_hold_none  # its tensors have no gradient, but are arguments
        or schema.keyword_only_tensors
    ):
        return kernel, None, ()
    gradient = (
        autograd.context_type(formula.function),
        _setup_context(formula, schema),
        _inputs(formula, schema),
    )
    return kernel, gradient, formula.sources


def _setup_context(
    formula: stock_formulas.StockFormula, schema: Schema
) -> Callable[..., Any] | None:
    """The user's `setup_context`, called as PyTorch calls it."""
    function = formula.setup_context
    if not function:
        return None
    is_simple, takes_keywords = dispatched.has_simple_defaults(schema), formula.takes_keywords

    def setup_context(ctx: Any, inputs: Any, keywords: Any, output: Any) -> None:
        if not is_simple:
            inputs, keywords = dispatched.as_filled(inputs, keywords, schema)
        if takes_keywords:
            function(ctx=ctx, inputs=inputs, keyword_only_inputs=keywords, output=output)
        else:
            function(ctx=ctx, inputs=inputs, output=output)

    return setup_context


def _inputs(
    formula: stock_formulas.StockFormula, schema: Schema
) -> Callable[[tuple[Any, ...]], tuple[list[Any], Any]] | None:
    """What the formula's function takes for all positional arguments, where C++ cannot tell.

    It is a list, and with it what PyTorch keeps in `ctx` of lists that were spread out, or None.
    """
    note_lists = formula.note_lists
    if note_lists is None and dispatched.has_simple_defaults(schema):
        return None

    def inputs(args: tuple[Any, ...]) -> tuple[list[Any], Any]:
        passed = args[: dispatched.count_passed(args, schema)]
        if note_lists is None:
            return list(passed), None
        return note_lists(passed, len(schema.returns))

    return inputs


def _version_counter(native: Any, name: OpName, overload: OpOverload) -> Any:
    """The kernel that counts versions, if it is PyTorch's."""
    kernel = native.python_kernel(name.packet, name.overload, "ADInplaceOrView")
    return kernel if stock_kernels.counts_versions_as_stock(kernel, overload) else None


def _returned_parameters(definition: CustomOpDef | None, schema: Schema) -> tuple[int, ...]:
    """The places of the parameters that `custom_op` requires to be returned."""
    if definition is None or not handles.returns_what_it_writes(definition):
        return ()
    arguments = (*schema.positional, *schema.keyword_only)
    return tuple(index for index, argument in enumerate(arguments) if argument.is_mutated)


def _finish(
    check: Callable[[tuple[Any, ...], dict[str, Any], Any], Any] | None, name: str, schema: Schema
) -> Callable[[tuple[Any, ...], dict[str, Any], Any], Any]:
    """What is checked of unusual results, and made of them."""
    convert = conversion(name, schema)
    if check is None:
        return lambda args, kwargs, result: convert(result)
    # A call returns through two kernels or more: what the first return changes, such as a tuple
    # that is too short, the second may refuse.
    return lambda args, kwargs, result: convert(convert(check(args, kwargs, result)))
