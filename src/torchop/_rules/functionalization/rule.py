"""Functionalization: how compilers trace an operator that mutates.

PyTorch functionalizes an operator that returns fresh tensors, and the trace keeps that form. The
other forms are traced as companions, which PyTorch compiles right:

- An operator with `torch.Tag.inplace` or `torch.Tag.out` is traced as one that returns nothing, and
  the trace goes on with its arguments. Inductor 2.13 treats a returned argument as fresh memory,
  and reuses that memory for later results; and PyTorch passes other memory than the caller's to an
  operator with `out=`, which holds no valid data.
- An operator that mutates a list with None in it is traced as one with a list without None, and an
  operator with an argument `mode` as one with another name for it.
- An operator that returns lists is traced as a functional one, which writes into copies. So is a
  call in which every mutated argument is None: nothing is copied then.

Arguments that PyTorch gets wrong for every form are replaced: views of another dtype, and
`hidden_aliases`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from torchop._compat import cpp_functionalization, registries, tracing
from torchop._compat.classes import FunctionalTensorMode, ProxyTorchDispatchMode
from torchop._core.call import map_tensors, mutated_tensors, returned_result
from torchop._core.declaration import Declaration
from torchop._core.definition import NOTHING, CompiledRule, Definition
from torchop._errors import FunctionalizationError
from torchop._rules.checkpoint_modes import saved_under_budget
from torchop._rules.functionalization.companions import (
    FUNCTIONAL,
    MUTABLE,
    define_of_kind,
    is_misread,
    masks,
    without_none,
)
from torchop._rules.functionalization.hidden_aliases import copy_hidden_aliases
from torchop._rules.functionalization.regions import (
    checking_regions,
    functionalizing_in_regions,
    needs_check_of_regions,
)
from torchop._rules.kernels.rule import KernelRule
from torchop._schema.forms import Form
from torchop._schema.schema import Argument, Schema


class Functionalized(NamedTuple):
    """The compiled rule: the operators that stand for this one in a functional trace."""

    companions: Mapping[str, Definition]
    returns_lists: bool
    # The types of outputs that a trace cannot follow.
    untraceable: tuple[str, ...]


class FunctionalizationRule(CompiledRule[Functionalized]):
    """How a compiler's functional trace records an operator that mutates."""

    companions: Mapping[str, Definition] = NOTHING
    # The backends that trace the function instead, and the function; for inlined operators.
    inlined: tuple[object, Callable[..., Any]] | None = None

    @classmethod
    def is_installed_on(cls, declaration: Declaration) -> bool:
        """Whether the trace may contain another operator; PyTorch handles companions correctly."""
        return declaration.schema.is_mutable and not declaration.is_companion

    def install(self) -> None:
        registries.offer_torch_dispatch(
            str(self.definition), FunctionalTensorMode, functionalizing(self.definition)
        )
        if needs_check_of_regions(self.definition.schema):
            registries.offer_torch_dispatch(
                str(self.definition),
                ProxyTorchDispatchMode,
                checking_regions(self.definition),
            )

    def install_on_defined(self) -> None:
        # At definition, not when a trace needs them: a process may load a cached or exported graph
        # that calls them, without a trace.
        self.companions = {
            kind: define_of_kind(self.definition, kind) for kind in _needed(self.definition.schema)
        }
        cpp_functionalization.implement(
            self.definition.overload, functionalizing_in_regions(self.definition)
        )

    def cache_parts(self) -> Iterator[object]:
        if self.inlined is not None:
            inlined, function = self.inlined
            yield from (str(inlined), function)
            providers = self.definition.rule(KernelRule).providers
            if providers is not None:  # the graph contains the kernel of the one that was chosen
                yield from providers.cache_parts(self.definition.name)

    def repr_text(self) -> str | None:
        return None if self.inlined is None else str(self.inlined[0])

    def compile(self) -> Functionalized:
        schema = self.definition.schema
        returns = schema.returns if schema.form is Form.PLAIN else ()
        return Functionalized(
            companions=self.companions,
            returns_lists="List[Tensor]" in returns,
            untraceable=tuple(kind for kind in returns if kind not in _TRACEABLE),
        )


_TRACEABLE = ("Tensor", "List[Tensor]")


def _needed(schema: Schema) -> Iterator[str]:
    is_misread = masks(schema) or any(argument.name == "mode" for argument in schema.arguments)
    if schema.form is not Form.PLAIN or is_misread:
        yield MUTABLE
    if schema.form is Form.PLAIN and schema.returns and set(schema.returns) <= set(_TRACEABLE):
        mutated = [argument.kind for argument in schema.arguments if argument.is_mutated]
        if "List[Tensor]" in schema.returns or "Tensor" not in mutated:
            yield FUNCTIONAL


def functionalizing(definition: Definition) -> Callable[..., Any]:
    """The rule for the functional trace of an operator that mutates."""
    schema = definition.schema

    def functionalize(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        rule = definition.plan[FunctionalizationRule]
        if rule.untraceable:
            raise _untraceable(definition, rule)
        args, kwargs = schema.fill_defaults(args, kwargs or {})
        values, keywords, copies = _copy_typed_views(mode, definition, args, kwargs)
        values, keywords = copy_hidden_aliases(mode, schema, values, keywords)
        with saved_under_budget(op, args, kwargs):
            result, written = _trace(definition, rule, mode, types, values, keywords)
        if result is NotImplemented:
            return result  # another mode or subclass may handle the operator
        with mode:
            for tensor, value in (*written, *copies):
                tensor.copy_(value)
        if schema.form is Form.PLAIN:
            return result
        return returned_result(schema, args, kwargs)

    return functionalize


# Tensors, and the new value of each.
_Values = list[tuple[Tensor, Tensor]]


def _trace(
    definition: Definition,
    rule: Functionalized,
    mode: Any,
    types: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, _Values]:
    """Calls the operator or its companion inside the functional trace.

    Returns the result, and what a functional companion wrote.
    """
    schema = definition.schema
    functional = rule.companions.get(FUNCTIONAL)
    mutated = [tensor for _, tensor in mutated_tensors(schema, args, kwargs)]
    if functional is not None and (rule.returns_lists or not mutated):
        if names := _names_if_shared(definition, args, kwargs, mutated):
            raise FunctionalizationError(
                f"{definition} was called with mutated arguments that share memory ({names}). An "
                "operator that mutates and returns a list is compiled into one that writes into "
                "copies, which would not share memory. Pass tensors that share no memory, or "
                "return a tuple of tensors instead of a list."
            )
        result = mode.__torch_dispatch__(functional.overload, types, args, kwargs)
        if result is NotImplemented:
            return result, []
        *returned, written = result
        pairs = list(zip(mutated, written, strict=True))
        return tuple(returned) if len(returned) > 1 else returned[0], pairs
    mutable = rule.companions.get(MUTABLE)
    overload = definition.overload
    if mutable is not None and (schema.form is not Form.PLAIN or is_misread(schema, args, kwargs)):
        overload = mutable.overload
        args, kwargs = without_none(schema, args, kwargs)
    return mode.__torch_dispatch__(overload, types, args, kwargs), []


def _copy_typed_views(
    mode: Any, definition: Definition, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], _Values]:
    """The arguments of a traced call, with copies in place of mutated views of another dtype.

    PyTorch's functionalization describes a mutated view by sizes and strides, without the dtype: an
    operator that writes into `torch.view_as_complex(x)` would get real numbers. It gets a copy of
    the view instead, which is copied back.
    """
    copies: _Values = []

    def change(argument: Argument, tensor: Tensor) -> Tensor:
        if not argument.is_mutated or not tracing.is_view_of_other_type(tensor):
            return tensor
        with mode:
            copies.append((tensor, tensor.clone()))
        return copies[-1][1]

    changed = map_tensors(definition.schema, args, kwargs, change)
    if names := _names_if_shared(definition, args, kwargs, [view for view, _ in copies]):
        raise FunctionalizationError(
            f"{definition} was called with a view of another type (such as x.real, or "
            f"torch.view_as_complex(x)) among its mutated arguments ({names}), and another of them "
            "has the same memory. A compiler replaces such a view with a copy, which would not "
            "share memory. Pass tensors that share no memory."
        )
    return *changed, copies


def _names_if_shared(
    definition: Definition, args: Any, kwargs: Any, tensors: Sequence[Tensor]
) -> str:
    """The mutated arguments of a call, if one of these tensors has the memory of another."""
    mutated = mutated_tensors(definition.schema, args, kwargs)
    memory = [tracing.traced_memory(tensor) for _, tensor in mutated]
    if all(memory.count(tracing.traced_memory(tensor)) < 2 for tensor in tensors):
        return ""
    return ", ".join(dict.fromkeys(name for name, _ in mutated))


def _untraceable(definition: Definition, rule: Functionalized) -> FunctionalizationError:
    return FunctionalizationError(
        f"{definition} mutates an argument and returns {', '.join(rule.untraceable)}, which a "
        "compiler cannot follow: it would keep the value that the fake kernel returned. Return "
        f"tensors instead, 0-dim for numbers. Got {definition.schema}."
    )
