"""The autograd.Function behind an operator: flat for autograd, structured for the formula.

Autograd follows only tensors that are arguments themselves. So the function takes each tensor of a
list as an argument, and `setup_context` and `backward` get lists again.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import autograd, compilers, dispatch, functorch, tracing
from torchop._compat.classes import DispatchKeySet
from torchop._core.definition import Definition
from torchop._errors import add_note
from torchop._rules.autograd import forward_mode, gradients
from torchop._rules.autograd.contiguous_grads import CONTIGUOUS_CODE
from torchop._rules.autograd.errors import explain_if_data_was_read, missing_formula
from torchop._rules.autograd.formula import Formula
from torchop._rules.autograd.gradients import Layout, flatten, input_layout, layout_of, unflatten
from torchop._schema.forms import Form


@dataclasses.dataclass(slots=True)
class _Call:
    """A call of the operator: its arguments, and the layouts of its inputs and outputs."""

    keyset: DispatchKeySet
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Layout | None
    is_dual: bool
    outputs: Layout | None = None
    returns_tuple: bool = False


class _Pending(threading.local):
    """The call that `apply` passes to `forward` beside the operands.

    As one more operand, it would be one more input to autograd: every backward would have to add a
    gradient of None for it, which PyTorch then discards.
    """

    call: _Call | None = None


_pending = _Pending()


def apply(
    function: Any,
    definition: Definition,
    keyset: DispatchKeySet,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    is_dual: bool = False,
) -> Any:
    """Calls an operator and records the call for backward; `is_dual` if there are tangents."""
    # The dispatcher drops trailing arguments that equal their default. A formula returns a gradient
    # for these too.
    inputs, _ = definition.schema.fill_defaults(args, kwargs)
    call = _Call(keyset, args, kwargs, input_layout(definition, inputs), is_dual)
    operands = flatten(inputs, call.inputs)
    _pending.call = call
    try:
        if functorch.is_active():
            result = autograd.at_single_level(lambda: function.apply(*operands))
        else:
            result = function.apply(*operands)
    finally:
        _pending.call = None  # `forward` resets it, if it was called
    if call.outputs is None:
        return result
    values = unflatten(result, call.outputs)
    return values if call.returns_tuple else values[0]


def make_function(definition: Definition, rule_type: Any) -> Any:
    """Makes the autograd.Function of an operator, whose formula is that of the `rule_type`."""
    formula: Callable[[], Formula] = functools.partial(definition.compiled, rule_type)

    def forward(ctx: Any, *operands: Any) -> Any:
        # Taken before the kernel runs, which may call an operator of ours in turn.
        call, _pending.call = _pending.call, None
        assert call is not None  # only `apply` above applies the function
        if call.inputs is not None:
            ctx._torchop_inputs = call.inputs
            # setup_context and backward see it in the structure of the arguments.
            ctx.needs_input_grad = unflatten(ctx.needs_input_grad, call.inputs)
        rule = formula()

        def run() -> tuple[Any, ...]:
            return rule.run(ctx, call.args, call.kwargs, lambda: _redispatch(definition, call))

        with autograd.below_autograd():
            # Outer transforms differentiate the operators that run here.
            is_inside = functorch.is_active()
            result, *seen = autograd.outer_levels_differentiate(run) if is_inside else run()
            if definition.schema.form is Form.INPLACE:
                result = call.args[0]  # a mode may have returned another object for this tensor
                # Otherwise autograd would make the result a view of the input, and record that.
                ctx.mark_dirty(result)
                tracing.show_mutation(result)
            if call.is_dual:
                ctx._torchop_dual = call, result
            if rule.save is not None:
                inputs, keywords = definition.schema.fill_defaults(call.args, call.kwargs)
                try:
                    rule.save(ctx, inputs, keywords, result, *seen)
                except Exception as error:
                    values = (*inputs, *keywords.values(), result)
                    explain_if_data_was_read(definition, "setup_context", values, error)
                    if compilers.dynamo_is_tracing():  # which shows no traceback that would tell it
                        add_note(error, f"in setup_context of {definition}")
                    raise
        if isinstance(result, Tensor):
            return result
        call.returns_tuple = isinstance(result, tuple)
        values = result if call.returns_tuple else (result,)
        call.outputs = layout_of(values)
        if call.outputs is None:
            return result
        ctx._torchop_outputs = call.outputs
        return tuple(flatten(values, call.outputs))

    def jvp(ctx: Any, *flat_tangents: Any) -> Any:
        call, result = ctx._torchop_dual
        del ctx._torchop_dual
        inputs, keywords = definition.schema.fill_defaults(call.args, call.kwargs)
        rule = formula().tangents
        assert rule is not None  # the kernel refuses tangents otherwise
        # PyTorch turns forward mode off here, without which the inputs have no tangents.
        return autograd.outer_levels_differentiate(
            lambda: tuple(forward_mode.tangents_of(definition, rule, inputs, keywords, result))
        )

    schema = definition.schema
    arguments = schema.positional
    count = len(arguments)
    no_tensors = [index for index, a in enumerate(arguments) if not a.holds_tensors]
    has_lists = schema.has_tensor_lists or any("List[" in kind for kind in schema.returns)

    # What an in-place operator wrote into a view, autograd fits into the gradient of its base.
    may_check_fit = schema.form is not Form.INPLACE

    def failed(error: Exception, ctx: Any, *grads: Any) -> None:
        rule = formula()
        if rule.backward is None:
            raise missing_formula(definition)
        saved = autograd.raw_saved_tensors(ctx)
        explain_if_data_was_read(definition, "backward formula", (*grads, saved), error)
        _note_what_is_missing(definition, rule, ctx, error)

    def checked(ctx: Any, result: Any, *, fits: bool = False) -> tuple[Any, ...]:
        inputs: Layout | None = ctx._torchop_inputs if has_lists else None
        needed = ctx.needs_input_grad
        flat = tuple(gradients.flat_gradients(definition, result, inputs, needed))
        if not fits and may_check_fit and not _hooks.extension.are_plain(flat, len(flat), ctx):
            gradients.check_fit(definition, flat, inputs, ctx)
        return flat

    # There are two of these: compiled autograd traces one, which must be Python throughout; the
    # engine runs the other, and often one in C++ instead.
    def made_backward(are_plain: Callable[[Any, int, Any], bool]) -> Callable[..., Any]:
        @compilers.never_traced
        def backward(*args: Any) -> tuple[Any, ...]:  # ctx, and a gradient for each output
            rule = formula()
            if has_lists:
                args = (args[0], *unflatten(args[1:], args[0]._torchop_outputs))
            if rule.backward is None:
                raise missing_formula(definition)
            try:
                if rule.save is None:  # nothing was saved
                    result = rule.backward(*args)
                else:
                    with Unpacking(args[0]):
                        result = rule.backward(*args)
            except Exception as error:
                failed(error, *args)
                raise
            if (
                not (has_lists and args[0]._torchop_inputs is not None)
                and are_plain(result, count, args[0])
                and not (no_tensors and any(result[index] is not None for index in no_tensors))
            ):
                flat: tuple[Tensor | None, ...] = result  # checked, and without lists
                return flat
            # In a compiler's trace, `ctx` does not know what the inputs look like.
            return checked(args[0], result, fits=are_plain is gradients.are_plain_in_python)

        return backward

    name = definition.name
    function = autograd.make_autograd_function(
        "_".join(filter(None, name)),  # and what autograd appends: "Backward"
        forward,
        made_backward(gradients.are_plain_in_python),
        jvp,
    )
    context = autograd.context_type(function)
    # On the class, because most calls have no lists, save no residuals, and set none of these.
    context._torchop_inputs = context._torchop_outputs = context._torchop_guard = None
    # The engine calls this. PyTorch's own `apply` first checks for kinds of functions that this one
    # never is.
    context.apply = made_backward(_hooks.extension.are_plain)
    read: Callable[[Any], Any] = saved_tensors
    if _hooks.extension.make_backward is not None and not has_lists:
        context.apply, read = _hooks.extension.make_backward(
            definition,
            rule_type,
            tuple(argument.holds_tensors for argument in arguments),
            failed,
            checked,
            _guarded,
            autograd.saved_tensors,
            saved_tensors,
            CONTIGUOUS_CODE,
        )
    context.saved_tensors = property(read)
    return function


def _note_what_is_missing(
    definition: Definition, formula: Formula, ctx: Any, error: Exception
) -> None:
    """Adds a note to the error for a missing attribute of `ctx`, which says who should set it."""
    attribute = error.name if isinstance(error, AttributeError) and error.obj is ctx else None
    code = getattr(inspect.unwrap(cast(Any, formula.function)), "__code__", None)
    reads_saved = code is not None and "saved_tensors" in code.co_names
    note = None
    if formula.setup_context is None:
        if reads_saved or attribute is not None:
            note = (
                f"the formula of {definition} has no setup_context, so nothing was saved on ctx; "
                "pass one to register_autograd: setup_context(ctx, inputs, output)"
            )
    elif attribute is not None:
        note = f"the setup_context of {definition} does not set it; add ctx.{attribute} = ... there"
    elif reads_saved and isinstance(error, (ValueError, IndexError)) and not ctx.saved_tensors:
        note = (
            f"the setup_context of {definition} saved no tensors; add ctx.save_for_backward(...) "
            "there"
        )
    if "numpy() on Tensor that requires grad" in str(error) and torch.is_grad_enabled():
        note = (
            f"the formula of {definition} is differentiated here (create_graph=True), and autograd "
            "cannot differentiate NumPy; put the NumPy part into an operator that has a formula"
        )
    if note is not None:
        add_note(error, note)


def _redispatch(definition: Definition, call: _Call) -> Any:
    keyset = call.keyset & dispatch.AFTER_AUTOGRAD
    return dispatch.redispatch(definition.overload, keyset, call.args, call.kwargs)


def saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """The saved tensors, which a formula may read several times.

    Selective checkpointing returns each of them only once, so they are cached while the backward
    runs. The cache is per thread: another thread may run the same node at the same time.
    """
    cache = _unpacked.by_node.get(id(ctx))
    if cache is None:
        return autograd.raw_saved_tensors(ctx)
    if not cache:
        cache.append(_guarded(ctx))
    return cache[0]


def _guarded(ctx: Any) -> tuple[Tensor | None, ...]:
    """The saved tensors for a formula, which may be differentiated itself."""
    tensors = autograd.raw_saved_tensors(ctx)
    # A transform around the one that differentiates here recorded the residuals itself.
    if not torch.is_grad_enabled() or functorch.is_active():
        return tensors
    guard = ctx._torchop_guard or ctx.non_differentiable  # where native calls leave it
    return guard(ctx, tensors) if guard else tensors


class _Unpacked(threading.local):
    """The saved tensors of the nodes whose backward runs in this thread, by node."""

    def __init__(self) -> None:
        self.by_node: dict[int, list[tuple[Tensor | None, ...]]] = {}


_unpacked = _Unpacked()


class Unpacking:
    """Lets `saved_tensors` cache the tensors while the backward of one node runs."""

    __slots__ = ("by_node", "node", "outer")

    def __init__(self, ctx: Any) -> None:
        self.by_node = _unpacked.by_node
        self.node = id(ctx)

    def __enter__(self) -> None:
        self.outer = self.by_node.get(self.node)
        self.by_node[self.node] = []

    def __exit__(self, *exception: object) -> None:
        if self.outer is None:
            del self.by_node[self.node]
        else:
            self.by_node[self.node] = self.outer
