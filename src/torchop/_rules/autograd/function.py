"""The `torch.autograd.Function` that records calls to an operator.

Autograd ignores tensors inside lists, so the `autograd.Function` takes each tensor of a list as a
separate argument, and restores the lists before it calls `setup_context` and `backward`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from torchop import _hooks
from torchop._compat import autocasting, autograd, compilers, dispatch, functorch, tracing
from torchop._compat.classes import DispatchKeySet
from torchop._core.call import tensors_in
from torchop._core.definition import Definition
from torchop._errors import add_note
from torchop._rules.autograd import constants, forward_mode, gradients
from torchop._rules.autograd.contiguous_grads import CONTIGUOUS_CODE
from torchop._rules.autograd.errors import (
    missing_formula,
    raise_if_attribute_was_read,
    raise_if_data_was_read,
)
from torchop._rules.autograd.formula import Formula
from torchop._rules.autograd.gradients import Layout, flatten, input_layout, layout_of, unflatten
from torchop._schema.forms import Form


@dataclasses.dataclass(slots=True)
class _Call:
    """The arguments and results of a call to the operator that autograd records.

    `inputs` and `outputs` record which arguments and results are lists.
    """

    keyset: DispatchKeySet
    args: Sequence[Any]
    kwargs: dict[str, Any]
    inputs: Layout | None
    is_dual: bool
    outputs: Layout | None = None
    returns_tuple: bool = False


class _Pending(threading.local):
    """Thread-local storage that passes the current call from `apply` to `forward`.

    If the call were an argument of the `autograd.Function` instead, every `backward` would have to
    return a gradient of None for it.
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
    """Call the operator and record the call for the backward pass.

    `function` is the result of `make_function`, and `is_dual` says whether any input has a tangent.
    """
    # The dispatcher drops trailing arguments that equal their default. Add them back, because
    # backward formulas return a gradient for every argument.
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
        _pending.call = None  # still set if an error occurred before `forward`
    if call.outputs is None:
        return result
    values = unflatten(result, call.outputs)
    return values if call.returns_tuple else values[0]


def make_function(definition: Definition, rule_type: Any) -> Any:
    """Create the `autograd.Function` of an operator.

    `rule_type` must be `AutogradRule`. It is a parameter because importing the class here would be
    circular.
    """
    formula: Callable[[], Formula] = functools.partial(definition.compiled, rule_type)

    def forward(ctx: Any, *operands: Any) -> Any:
        # Clear `_pending` before the kernel runs, because the kernel may call other operators,
        # which must not mistake this call for their own.
        call, _pending.call = _pending.call, None
        assert call is not None
        if call.inputs is not None:
            ctx._torchop_inputs = call.inputs
            # PyTorch's `needs_input_grad` has one entry for each tensor in a list, but backward
            # formulas expect one entry for each argument.
            ctx.needs_input_grad = unflatten(ctx.needs_input_grad, call.inputs)
        if autocasting.is_enabled():
            _save_autocast(ctx)
        rule = formula()

        def run() -> tuple[Any, ...]:
            return rule.run(call.args, call.kwargs, lambda: _redispatch(definition, call))

        with autograd.below_autograd():
            # If torch.func transforms are nested, the outer transforms must still be able to
            # differentiate the operators called here.
            is_inside = functorch.is_active()
            result, *seen = autograd.outer_levels_differentiate(run) if is_inside else run()
            if definition.schema.form is Form.INPLACE:
                result = call.args[0]  # a mode may have returned a different object
                # Without mark_dirty, autograd would return a view of the input instead of the input
                # itself.
                ctx.mark_dirty(result)
                tracing.show_mutation(result)
            if call.is_dual:
                ctx._torchop_dual = call, result
            if rule.save is not None:
                inputs, keywords = definition.schema.fill_defaults(call.args, call.kwargs)
                saved: Any = (inputs, keywords, result, *seen)
                if tracing.records_graph():
                    saved = tracing.without_attributes(saved)
                try:
                    rule.save(ctx, *saved)
                except Exception as error:
                    values = (*inputs, *keywords.values(), result)
                    raise_if_data_was_read(definition, "setup_context", values, error)
                    raise_if_attribute_was_read(definition, "setup_context", error)
                    if compilers.dynamo_is_tracing():
                        # Dynamo's error does not show this frame, so name the operator in a note.
                        add_note(error, f"in setup_context of {definition}")
                    raise
                is_eager = not is_inside and not tracing.is_tracing(tensors_in(operands))
                if is_eager and not rule.computed:
                    find_computed(ctx, rule, operands, saved)
        if isinstance(result, Tensor):
            return result
        call.returns_tuple = isinstance(result, tuple)
        values = result if call.returns_tuple else (result,)
        call.outputs = layout_of(values)
        if call.outputs is None:
            return result
        ctx._torchop_outputs = call.outputs
        return tuple(flatten(values, call.outputs))

    def find_computed(ctx: Any, rule: Formula, operands: Any, saved: Any) -> None:
        training, setup = rule.training, rule.setup
        assert setup is not None  # otherwise `rule.computed` is not empty

        def residuals(flat: Any) -> dict[str, Any]:
            return {} if training is None else {"residuals": training.declared.rebuilt(flat)}

        values = (*saved[:3], saved[3] if training is not None else ())
        found = constants.find_computed(setup, ctx, operands, values, residuals)
        for name in found.attributes:
            attribute = constants.ComputedAttribute(name, definition, lambda: formula().computed)
            setattr(context, name, attribute)
        rule.computed.append(found)
        definition.outdate_plan()  # later calls may be native (without the dispatcher)
        _ = definition.plan  # compile it now, because compiled autograd cannot trace this

    def jvp(ctx: Any, *flat_tangents: Any) -> Any:
        call, result = ctx._torchop_dual
        del ctx._torchop_dual
        inputs, keywords = definition.schema.fill_defaults(call.args, call.kwargs)
        rule = formula().tangents
        assert rule is not None  # otherwise, the autograd kernel would have raised
        # PyTorch disables forward mode while it calls this method, so enable it again, because
        # `tangents_of` must unpack the tangents of the inputs.
        return autograd.outer_levels_differentiate(
            lambda: tuple(forward_mode.tangents_of(definition, rule, inputs, keywords, result))
        )

    schema = definition.schema
    arguments = schema.positional
    count = len(arguments)
    no_tensors = [index for index, a in enumerate(arguments) if not a.holds_tensors]
    has_lists = schema.has_tensor_lists or any("List[" in kind for kind in schema.returns)

    # If an in-place operator wrote to a view, the gradient has the shape of the view's base, so do
    # not compare the gradient with the input.
    may_check_fit = schema.form is not Form.INPLACE

    def on_error(error: Exception, ctx: Any, *grads: Any) -> None:
        rule = formula()
        if rule.backward is None:
            raise missing_formula(definition)
        saved = autograd.raw_saved_tensors(ctx)
        raise_if_data_was_read(definition, "backward formula", (*grads, saved), error)
        raise_if_attribute_was_read(definition, "backward formula", error)
        _add_hint(definition, rule, ctx, error)

    def flatten_and_check(ctx: Any, result: Any, *, fits: bool = False) -> tuple[Any, ...]:
        inputs: Layout | None = ctx._torchop_inputs if has_lists else None
        needed = ctx.needs_input_grad
        flat = tuple(gradients.flat_gradients(definition, result, inputs, needed))
        if not fits and may_check_fit and not _hooks.extension.are_plain(flat, len(flat), ctx):
            gradients.check_fit(definition, flat, inputs, ctx)
        return flat

    # `make_backward` is called twice. Compiled autograd traces the backward function with
    # `are_plain_in_python`, which therefore must not call C++ code. The autograd engine runs the
    # backward function with the C++ check, or an implementation entirely in C++.
    def make_backward(are_plain: Callable[[Any, int, Any], bool]) -> Callable[..., Any]:
        @compilers.never_traced
        def backward(*args: Any) -> tuple[Any, ...]:  # ctx and one gradient per output
            rule = formula()
            if has_lists:
                args = (args[0], *unflatten(args[1:], args[0]._torchop_outputs))
            if rule.backward is None:
                raise missing_formula(definition)
            try:
                with _autocast_of_forward(args[0]):
                    if rule.save is None:  # nothing was saved
                        result = rule.backward(*args)
                    else:
                        with Unpacking(args[0]):
                            result = rule.backward(*args)
            except Exception as error:
                on_error(error, *args)
                raise
            if (
                not (has_lists and args[0]._torchop_inputs is not None)
                and are_plain(result, count, args[0])
                and not (no_tensors and any(result[index] is not None for index in no_tensors))
            ):
                flat: tuple[Tensor | None, ...] = result
                return flat
            # While tracing, `ctx` has no metadata about the inputs, so do not compare the shapes.
            is_traced = are_plain is gradients.are_plain_in_python
            return flatten_and_check(args[0], result, fits=is_traced)

        return backward

    name = definition.name
    function = autograd.make_autograd_function(
        "_".join(filter(None, name)),  # autograd appends "Backward"
        forward,
        make_backward(gradients.are_plain_in_python),
        jvp,
    )
    context = autograd.context_type(function)
    # Set defaults on the class, because most calls do not set these attributes.
    context._torchop_inputs = context._torchop_outputs = context._torchop_guard = None
    context._torchop_operator = definition, formula
    context._torchop_autocast = None
    context._torchop_save_autocast = _save_autocast  # C++ calls it
    # The engine calls `apply` of the context class, so replace it to avoid the lookups of `vjp`,
    # `backward` and `boxed_grads_call` in `BackwardCFunction.apply` (torch/autograd/function.py).
    context.apply = in_python = make_backward(_hooks.extension.are_plain)
    read: Callable[[Any], Any] = saved_tensors
    if _hooks.extension.make_backward is not None and not has_lists:
        context.apply, read = _hooks.extension.make_backward(
            definition,
            rule_type,
            tuple(argument.holds_tensors for argument in arguments),
            on_error,
            flatten_and_check,
            _saved_for_formula,
            autograd.saved_tensors,
            saved_tensors,
            CONTIGUOUS_CODE,
            in_python,
        )
    context.saved_tensors = property(read)
    return function


def _add_hint(definition: Definition, formula: Formula, ctx: Any, error: Exception) -> None:
    """If a common mistake in a backward formula caused `error`, add a note with the fix to it."""
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


def _save_autocast(ctx: Any) -> None:
    """Save the autocast state, so that the backward formula runs in the same state as the kernel.

    Compilers trace the formula in the state of the forward pass (`backward_pass_autocast` in
    torch/_functorch/config.py), so in any other state, eager mode and compiled code would compute
    different dtypes.
    """
    ctx._torchop_autocast = autocasting.state()


def _autocast_of_forward(ctx: Any) -> contextlib.AbstractContextManager[None]:
    if ctx._torchop_autocast is None and not autocasting.is_enabled():
        return contextlib.nullcontext()
    return autocasting.restored(ctx._torchop_autocast)


def saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return a node's saved tensors, even if its backward formula reads them several times.

    Workaround for pytorch/pytorch#82156: saved tensors of a checkpointed region can be unpacked
    only once, so they are cached during the backward pass. The cache is thread-local, because
    several threads may run the backward pass of the same node.
    """
    cache = _unpacked.by_node.get(id(ctx))
    if cache is None:
        return autograd.raw_saved_tensors(ctx)
    if not cache:
        cache.append(_saved_for_formula(ctx))
    return cache[0]


def _saved_for_formula(ctx: Any) -> tuple[Tensor | None, ...]:
    """Return the saved tensors to pass to a backward formula.

    In a double backward, residuals (kernel outputs that only the backward pass uses) and tensors
    that `setup_context` computed are replaced with tensors that raise when they are differentiated.
    """
    tensors = autograd.raw_saved_tensors(ctx)
    # In a torch.func transform, nothing needs to be replaced, because the call went to the helper
    # operator `name__with_residuals`, whose backward formula raises if a residual is
    # differentiated.
    if not torch.is_grad_enabled() or functorch.is_active():
        return tensors
    # `guard` replaces the residuals (kernel outputs that only the backward pass uses). For calls
    # that ran in C++, it is stored in the attribute `non_differentiable`.
    guard = ctx._torchop_guard or ctx.non_differentiable
    tensors = guard(ctx, tensors) if guard else tensors
    definition, formula = ctx._torchop_operator
    for computed in formula().computed:
        tensors = computed.guarded(definition, ctx, tensors)
    return tensors


class _Unpacked(threading.local):
    def __init__(self) -> None:
        self.by_node: dict[int, list[tuple[Tensor | None, ...]]] = {}


_unpacked = _Unpacked()


class Unpacking:
    """Context manager that caches the result of `saved_tensors` for one autograd node."""

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
