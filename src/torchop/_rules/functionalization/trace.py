"""The functionalization rule: how FunctionalTensorMode traces operators that mutate arguments.

If an operator returns only fresh tensors, PyTorch functionalizes it correctly. In the cases below,
the trace contains a helper operator instead, which PyTorch compiles correctly:

- An operator with `torch.Tag.inplace` or `torch.Tag.out` is traced as an operator that returns
  nothing, and the trace continues with the mutated arguments. Otherwise Inductor 2.13 would treat a
  returned argument as fresh memory and reuse that memory for later results. For `out=`, PyTorch
  would also pass uninitialized memory instead of the caller's tensor.
- If an operator mutates a list that contains None, the trace contains the list without None. An
  argument named `mode` is renamed in the trace.
- An operator that returns lists is traced as a functional operator that writes into copies. The
  same functional operator is traced if all mutated arguments of a call are None.

For all operators, this module also copies mutated views that PyTorch describes incorrectly (see
`misread_views`), and protects copies that compilers might remove (see `hidden_aliases`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torchop._compat import cpp_functionalization, registries
from torchop._compat.classes import FunctionalTensorMode, ProxyTorchDispatchMode
from torchop._core.call import mutated_tensors, returned_result
from torchop._core.definition import Definition
from torchop._errors import TracingError
from torchop._rules import in_autocast, inlining
from torchop._rules.checkpoint_modes import marked
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
from torchop._rules.functionalization.regions import (
    checking_regions,
    functionalizing_in_regions,
    needs_check_of_regions,
)
from torchop._rules.helper_operators import HelperOperator
from torchop._schema.forms import Form
from torchop._schema.schema import Schema


def install(definition: Definition) -> Callable[[], None] | None:
    """Install the functionalization rule of a new operator, if it mutates arguments.

    Helper operators need no rule, because PyTorch functionalizes them correctly. Call the returned
    function once the operator is defined.
    """
    schema = definition.schema
    if not schema.is_mutable or definition.declaration.is_helper:
        return None
    name = str(definition)
    of_form = definition.declaration.functionalize
    rule = of_form or inlining.around(definition, _functionalizing(definition))
    registries.register_default_torch_dispatch(name, FunctionalTensorMode, rule)
    if needs_check_of_regions(schema):
        registries.register_default_torch_dispatch(
            name, ProxyTorchDispatchMode, checking_regions(definition)
        )

    def finish() -> None:
        for kind in _needed(schema) if of_form is None else ():
            kind.of(definition)
        cpp_functionalization.implement(definition.overload, functionalizing_in_regions(definition))

    return finish


_TRACEABLE = ("Tensor", "List[Tensor]")


def _traced_results(schema: Schema) -> tuple[str, ...]:
    """Return the types of the results that appear in a trace.

    The results of in-place and out= forms do not appear, because they are arguments.
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


def _functionalizing(definition: Definition) -> Callable[..., Any]:
    """Return the rule for FunctionalTensorMode."""
    schema = definition.schema

    def functionalize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        untraceable = [kind for kind in _traced_results(schema) if kind not in _TRACEABLE]
        if untraceable:
            raise _untraceable(definition, untraceable)
        args, kwargs = schema.fill_defaults(args, kwargs or {})
        keep_mutated_copies(mode, schema, args, kwargs)
        (values, keywords), copies = copy_misread_views(mode, str(definition), schema, args, kwargs)
        values, keywords = copy_hidden_aliases(mode, schema, values, keywords)
        with marked(op, args, kwargs):
            result, written = _trace(definition, mode, types, values, keywords)
        if result is NotImplemented:
            return result  # another mode or subclass may handle the call
        with mode:
            for tensor, value in (*written, *copies):
                tensor.copy_(value)
        if schema.form is Form.PLAIN:
            return result
        return returned_result(schema, args, kwargs)

    return functionalize


def _trace(
    definition: Definition,
    mode: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, TensorPairs]:
    """Trace a call to the operator or to one of its helper operators.

    Return the result, and pairs of a mutated argument and its new value, which the caller must copy
    into the argument. There are no pairs unless `name__functional` was traced, because the other
    operators write the new values themselves.
    """
    schema = definition.schema
    functional = definition.helpers.get(Functional.kind)
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    if functional is not None and ("List[Tensor]" in _traced_results(schema) or not mutated):
        if names := names_if_shared(schema, args, kwargs, mutated):
            raise TracingError(
                f"{definition} was called with mutated arguments that share memory ({names}). An "
                "operator that mutates and returns a list is compiled into one that writes into "
                "copies, and these would not share memory. Pass tensors that share no memory, or "
                "return a tuple of tensors instead of a list."
            )
        result = in_autocast.trace(mode, functional.overload, types, args, kwargs)
        if result is NotImplemented:
            return result, []
        returned, (written,) = functional.split(result)
        return returned, list(zip(mutated, written, strict=True))
    mutable = definition.helpers.get(Mutable.kind)
    overload = definition.overload
    if mutable is not None and (schema.form is not Form.PLAIN or is_misread(schema, args, kwargs)):
        overload = mutable.overload
        args, kwargs = without_none(schema, args, kwargs)
    return in_autocast.trace(mode, overload, types, args, kwargs), []


def _untraceable(definition: Definition, kinds: Sequence[str]) -> TracingError:
    return TracingError(
        f"{definition} mutates an argument and returns {', '.join(kinds)}. A compiler "
        "would keep the value that the fake kernel returned. Return tensors instead, 0-dim for "
        f"numbers. Got {definition.schema}."
    )
