"""The functionalization rule: how compilers trace operators that mutate arguments.

`FunctionalTensorMode` replaces a call that mutates arguments with `auto_functionalized_v2`. Where
this would be wrong, the rule changes the call in the steps below, which apply to all operators that
mutate arguments, whether `custom_op`, `Library.define` or another package defined them.

Each step works around bugs in PyTorch. Once the tests named in a step fail on all supported
releases, PyTorch has fixed these bugs, and the step can be deleted.

1. `hidden_aliases.keep_mutated_copies`: Inductor removes a copy although an operator writes into it
   (pytorch/pytorch#198031, and `can_inplace` in torch/_inductor/fx_passes/reinplace.py).
   Tests: `test_pytorch_reads_another_row_for_a_clone`,
   `test_inductor_itself_overwrites_a_copy_that_is_written`.
2. `misread_views.copy_misread_views`: `write_view_information_to_args` and `try_use_slice` in
   torch/_higher_order_ops/auto_functionalize.py describe a view without its dtype, or with a wrong
   offset. Tests: `test_pytorch_gets_the_type_of_a_view_wrong`,
   `test_pytorch_writes_a_slice_of_an_offset_input_elsewhere`.
3. `hidden_aliases.copy_hidden_aliases`: Inductor removes a copy of a tensor that the same call
   mutates (pytorch/pytorch#198031). Test: `test_inductor_itself_removes_the_copy`.
4. `helper_operators`: the trace contains a helper operator instead of the operator. Operators that
   `custom_op` did not define have no helper operators, so `torchop::in_autocast` calls them by name
   instead.
   - An operator with `torch.Tag.inplace` or `torch.Tag.out` becomes an operator that returns
     nothing, and the trace continues with the mutated arguments. Inductor 2.13 treats a returned
     argument as fresh memory, and reuses this memory for later results. For `out=`,
     `_do_auto_functionalize_v2_for_out_operator` passes uninitialized memory. Tests:
     `test_inductor_itself_removes_the_copy`, `test_out_operator_reads_its_output_argument`.
   - A mutated list that contains None is passed without None, and an argument named `mode` is
     renamed. `do_auto_functionalize_v2` supports neither. Tests:
     `test_a_mutated_list_with_none_fails_in_pytorch`,
     `test_an_argument_named_mode_fails_in_pytorch`.
   - An operator that returns lists becomes a functional operator that writes into copies, and so
     does a call whose mutated arguments are all None. `can_auto_functionalize` rejects list
     results. Test: `test_a_list_result_fails_in_pytorch`.
5. `hidden_aliases.keep_returned_copies`, a pass over Inductor's graph: Inductor removes a copy that
   the program returns, although it writes to the original again (`any_use_of_views_after_node` in
   torch/_inductor/fx_passes/reinplace.py). Test:
   `test_inductor_itself_changes_a_copy_between_two_writes`.
6. `regions`: in a nested region that mutates its inputs, PyTorch uses C++ functionalization, which
   rejects custom operators (pytorch/pytorch#186807, pytorch/pytorch#189523). Test:
   `test_pytorch_rejects_an_operator_that_mutates_an_input_of_a_region`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from torchop._compat import dispatch
from torchop._compat.classes import FunctionalTensorMode, OpOverload, ProxyTorchDispatchMode
from torchop._core.call import mutated_tensors, returned_result
from torchop._core.definition import NOTHING, Definition
from torchop._core.registered import Registrations
from torchop._core.registry import find_schema, op_name, own_definition
from torchop._errors import TracingError
from torchop._rules import in_autocast, inlining
from torchop._rules.checkpoint_modes import marked
from torchop._rules.effect import functionalize_unless_dropped
from torchop._rules.functionalization import regions
from torchop._rules.functionalization.helper_operators import (
    Functional,
    Mutable,
    is_misread,
    masks,
    without_none,
)
from torchop._rules.functionalization.hidden_aliases import (
    copy_hidden_aliases,
    keep_mutated_copies,
)
from torchop._rules.functionalization.misread_views import (
    TensorPairs,
    copy_misread_views,
    names_if_shared,
)
from torchop._rules.helper_operators import HelperOperator
from torchop._schema.forms import Form
from torchop._schema.schema import Schema


def install(definition: Definition) -> Callable[[], None] | None:
    """Install the functionalization rule for a new operator if it mutates arguments.

    Helper operators, which replace other operators in compiled graphs, need no such rule, because
    PyTorch functionalizes them correctly. The caller must call the returned function once the
    operator is defined.
    """
    if not definition.schema.is_mutable or definition.declaration.is_helper:
        return None
    of_form = definition.declaration.functionalize
    _install(definition.registered, of_form or inlining.around(definition, functionalize))

    def finish() -> None:
        for kind in _needed(definition.schema) if of_form is None else ():
            kind.of(definition)
        regions.install(definition.overload, definition.schema)

    return finish


def install_low_level(registered: Registrations, *, is_mutable: bool) -> None:
    """Install the functionalization rule for an operator that `custom_op` did not define."""
    if is_mutable:
        _install(registered, functionalize)
        uninstall = functools.partial(regions.uninstall, registered.name)
        registered.add("C++ functionalization", None, uninstall)
    else:
        registered.add_default_rule(FunctionalTensorMode, functionalize_unless_dropped)


def functionalize(mode: Any, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call in FunctionalTensorMode."""
    name = op_name(op, "torch.compile")
    definition = own_definition(op, name)
    if definition is None:
        schema, helpers = find_schema(name), NOTHING
    else:
        schema, helpers = definition.schema, definition.helpers
        _check_results(definition)
    args, kwargs = schema.fill_defaults(args, kwargs or {})
    keep_mutated_copies(mode, schema, args, kwargs)
    call, copies = copy_misread_views(mode, name, schema, args, kwargs)
    call = copy_hidden_aliases(mode, schema, *call)
    with marked(op, args, kwargs):
        result, written = _trace(schema, helpers, mode, op, types, *call)
    if result is NotImplemented:
        return result  # another mode or subclass may handle the call
    with mode:
        for tensor, value in (*written, *copies):
            tensor.copy_(value)
    if schema.form is Form.PLAIN:
        return result
    # PyTorch's result has the value of the argument but is a different tensor, so return the
    # argument.
    return returned_result(schema, args, kwargs)


def _install(registered: Registrations, trace: Callable[..., Any]) -> None:
    registered.add_default_rule(FunctionalTensorMode, trace)
    registered.add_default_rule(ProxyTorchDispatchMode, regions.trace)


def _check_results(definition: Definition) -> None:
    """Raise if a compiled graph would contain a result of the fake kernel as a constant."""
    schema = definition.schema
    untraceable = [kind for kind in _traced_results(schema) if kind not in _TRACEABLE]
    if untraceable:
        raise TracingError(
            f"{definition} mutates an argument and returns {', '.join(untraceable)}. A compiler "
            "would keep the value that the fake kernel returned. Return tensors instead, 0-dim for "
            f"numbers. Got {schema}."
        )


def _trace(
    schema: Schema,
    helpers: Mapping[str, HelperOperator],
    mode: Any,
    op: OpOverload,
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, TensorPairs]:
    """Trace a call to the operator or to one of its helper operators.

    Return the result, and pairs of a mutated argument and its new value, which the caller must copy
    into the argument. The list of pairs is empty unless `name__functional` was traced, because the
    other operators write the new values themselves. `helpers` maps kinds to helper operators.
    """
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    kind = _kind(schema, args, kwargs, mutated)
    if kind is None:
        return in_autocast.trace(mode, op, types, args, kwargs), []
    if kind is Functional and (names := names_if_shared(schema, args, kwargs, mutated)):
        raise TracingError(
            f"{op._name} was called with mutated arguments that share memory ({names}). An "
            "operator that mutates and returns a list is compiled into one that writes into "
            "copies, and these would not share memory. Pass tensors that share no memory, or "
            "return a tuple of tensors instead of a list."
        )
    helper = helpers.get(kind.kind)
    if helper is None:
        if dispatch.has_kernel(op._name, "Functionalize"):  # registered by the user
            return in_autocast.trace(mode, op, types, args, kwargs), []
        returns_arguments = schema.form is not Form.PLAIN
        result = in_autocast.trace_by_name(
            mode, op, types, args, kwargs, returns_arguments=returns_arguments
        )
        return result, []
    if kind is Mutable:
        args, kwargs = without_none(schema, args, kwargs)
    result = in_autocast.trace(mode, helper.overload, types, args, kwargs)
    if kind is Mutable or result is NotImplemented:
        return result, []
    returned, (written,) = helper.split(result)
    return returned, list(zip(mutated, written, strict=True))


def _kind(
    schema: Schema, args: Sequence[Any], kwargs: Mapping[str, Any], mutated: Sequence[Tensor]
) -> type[HelperOperator] | None:
    """Return the kind of the helper operator that a call needs, or None if it needs none."""
    returns = _traced_results(schema)
    if returns and set(returns) <= set(_TRACEABLE) and ("List[Tensor]" in returns or not mutated):
        return Functional
    if schema.form is not Form.PLAIN or is_misread(schema, args, kwargs):
        return Mutable
    return None


_TRACEABLE = ("Tensor", "List[Tensor]")


def _traced_results(schema: Schema) -> tuple[str, ...]:
    """Return the types of the results that appear in a trace.

    The results of in-place and out= operators do not appear, because they are arguments.
    """
    return schema.returns if schema.form is Form.PLAIN else ()


def _needed(schema: Schema) -> Iterator[type[HelperOperator]]:
    is_misread = masks(schema) or any(argument.name == "mode" for argument in schema.arguments)
    if schema.form is not Form.PLAIN or is_misread:
        yield Mutable
    if schema.form is Form.PLAIN and schema.returns and set(schema.returns) <= set(_TRACEABLE):
        mutated = [argument.kind for argument in schema.arguments if argument.is_mutated]
        if "List[Tensor]" in schema.returns or "Tensor" not in mutated:
            yield Functional
