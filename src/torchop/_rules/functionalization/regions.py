"""Support operators that mutate arguments inside `torch.compiler.nested_compile_region`.

Workaround for pytorch/pytorch#186807 and #189523: if a nested region mutates its inputs, PyTorch
traces the region with C++ functionalization and rejects custom operators that mutate arguments.
This module traces calls to these operators in a FunctionalTensorMode instead, where the operator's
functionalization rule applies.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

from torch import Tensor

from torchop._compat import cpp_functionalization as functional
from torchop._compat import operators, torch_ops, tracing
from torchop._compat.classes import OpOverload
from torchop._core.call import (
    map_tensors,
    mutated_tensors,
    named_tensors,
    passed,
    replaced,
    returned_result,
)
from torchop._core.registry import find_schema, op_name, own_definition
from torchop._errors import TracingError
from torchop._schema.forms import Form
from torchop._schema.schema import Argument, Schema


def install(op: OpOverload, schema: Schema) -> None:
    """Register the kernel that C++ functionalization calls for an operator."""

    def functionalize(*args: Any, **kwargs: Any) -> Any:
        _check_memory(op, schema, args, kwargs)
        before: dict[Tensor, Tensor] = {}
        traced: dict[Tensor, Tensor] = {}

        def trace(_: Argument, tensor: Tensor) -> Tensor:
            if functional.is_functional(tensor) and tensor not in traced:
                before[tensor] = functional.current_value(tensor)
                traced[tensor] = functional.wrap_for_mode(before[tensor])
            return traced.get(tensor, tensor)

        with functional.traced_by_mode():
            values, keywords = map_tensors(schema, args, kwargs, trace)
            result = _map_results(op(*values, **keywords), functional.value_in_mode)
            after = {tensor: functional.value_in_mode(value) for tensor, value in traced.items()}
        for tensor, value in after.items():
            if value is not before[tensor]:
                functional.replace_value(tensor, value)
        if schema.form is not Form.PLAIN:
            return returned_result(schema, args, kwargs)
        return _map_results(result, functional.wrap)

    functional.implement(op, functionalize)


def uninstall(qualname: str) -> None:
    op = torch_ops.existing_overload(*operators.parts(qualname))
    if op is not None:
        functional.withdraw(op)


def trace(mode: Any, op: OpOverload, types: Any, args: Any, kwargs: Any) -> Any:
    """Trace a call in ProxyTorchDispatchMode.

    Raise an error if PyTorch would not notice that the nested region mutates one of its inputs.
    PyTorch's `check_input_alias_and_mutation_return_outputs` (torch/_higher_order_ops/utils.py)
    fails if a mutable argument is a list or None, and ignores keyword arguments.
    """
    kwargs = kwargs or {}
    if functional.is_finding_mutations():
        name = op_name(op, "torch.compile")
        schema = find_schema(name)
        # Operators defined with `custom_op` have this kernel already. For other operators, register
        # it only now, because registering it earlier would create an OpOverload when the operator
        # is defined.
        if own_definition(op, name) is None:
            install(op, schema)
        for argument, value in passed(schema.mutated_places, args, kwargs):
            if argument in kwargs:
                tensors = [tensor for _, _, tensor in named_tensors([(argument, value)])]
                problem = functional.overlap_inputs(mode, tensors) and "passed by keyword"
            else:
                problem = not isinstance(value, Tensor) and "a list or None"
            if problem:
                raise TracingError(
                    f"{name} mutates {argument!r}, which is {problem}, in a region of "
                    "torch.compiler.nested_compile_region. PyTorch only finds mutations of "
                    "tensors that are passed by position. Call the operator outside of the "
                    "region, or use one that mutates only positional tensors."
                )
    return mode.__torch_dispatch__(op, types, args, kwargs)


def _map_results(result: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(result, tuple):
        return tuple(replaced(item, Tensor, change) for item in result)
    return replaced(result, Tensor, change)


def _check_memory(op: OpOverload, schema: Schema, args: Any, kwargs: Any) -> None:
    """Raise if mutated arguments may overlap, because the trace treats them as separate memory."""
    for (name, one), (other_name, other) in combinations(mutated_tensors(schema, args, kwargs), 2):
        if one is not other and tracing.may_overlap(one, other):
            raise TracingError(
                f"{op.name()} was called in a nested region, with mutated arguments that may "
                f"overlap in memory ({name}, {other_name}). A compiler traces each as separate "
                "memory. Pass tensors that do not overlap, or call the operator outside of "
                "torch.compiler.nested_compile_region."
            )
