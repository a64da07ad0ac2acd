"""Replaces operators that write by functional ones and copies.

PyTorch's own functional form of such a call, `auto_functionalized`, passes the operator as an
argument, which the exporter to ONNX cannot read. It also describes views. A copy into the argument
does not need that, because functionalization follows the copy through all views, as for PyTorch's
operators.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

import torchop
from torchop._compat import functional_traces
from torchop._rules.functionalization.companions import functional_schema, writing_into_copies
from torchop.extend import (
    Operator,
    OpOverload,
    Schema,
    mutated_tensors,
    named_outputs,
    values_by_name,
)


class StandIn(NamedTuple):
    """What a functional operator stands for.

    It returns what the original returns besides its arguments, and then the new value of each
    tensor that the original writes into.

    Attributes:
        original: the operator that writes.
        outputs: how many tensors the functional one returns.
    """

    original: OpOverload
    outputs: int


# The functional operators that there are, which live as long as the process, for the programs in
# which they stand can be run; and the same by what they stand for. An operator may be replaced by
# another one of its name.
stand_ins: dict[OpOverload, StandIn] = {}
_overloads: dict[StandIn, OpOverload] = {}
_numbers = itertools.count()
# One program at a time: the rules of its operators are put back after it.
_lock = threading.Lock()


def operators_in(program: ExportedProgram) -> dict[str, OpOverload]:
    """The operators that a program calls or passes as arguments, by name."""
    operators: dict[str, OpOverload] = {}
    for node in _nodes(program):
        for value in (node.target, *node.args, *node.kwargs.values()):
            if isinstance(value, OpOverload):
                operators[value.name()] = value
    return operators


def _nodes(program: ExportedProgram) -> Iterator[Node]:
    for module in program.graph_module.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def without_writing(program: ExportedProgram) -> ExportedProgram:
    """A program in which functional operators and copies replace operators that write.

    The original program does not change.
    """
    for node in _nodes(program):
        _refuse_functionalized(node)
    writing = [
        op
        for op in operators_in(program).values()
        if op.namespace not in ("aten", "prims") and Schema(op._schema).is_mutable
    ]
    if not writing:
        return program
    with _lock, contextlib.ExitStack() as rules:
        for op in filter(_needs_stand_in, writing):
            rules.enter_context(functional_traces.traced_by(op, _functionalizing(op)))
        functional: ExportedProgram = program.run_decompositions({})  # and nothing is decomposed
    return functional


def _refuse_functionalized(node: Node) -> None:
    if isinstance(node.target, OpOverload) or not callable(node.target):
        return
    for value in node.args:
        if isinstance(value, OpOverload):
            raise torchop.FunctionalizationError(
                f"the program was decomposed already, and passes {value.name()} to "
                f"{getattr(node.target, '__name__', node.target)}. Pass the program as "
                "torch.export.export returned it, without run_decompositions."
            )


def _needs_stand_in(op: OpOverload) -> bool:
    """Whether only PyTorch's general form of functional calls fits an operator that writes."""
    handle = Operator(op, "export").handle
    # The forms of a family have a rule of their own, which says what stands for them.
    return handle is None or not functional_traces.has_rule(handle)


def _functionalizing(op: OpOverload) -> Callable[..., Any]:
    """The rule for the functional trace, which records the functional operator and copies."""
    schema = Schema(op._schema)
    if not all("Tensor" in kind for kind in schema.returns):
        raise torchop.FunctionalizationError(
            f"{op.name()} writes into an argument and returns more than tensors, which no exported "
            "program can express. Return tensors instead, 0-dim for numbers."
        )
    # For each result, the argument that it is.
    arguments = {
        alias: argument.name
        for argument in op._schema.arguments
        if argument.alias_info is not None
        for alias in argument.alias_info.before_set
    }
    returned = [
        None if result.alias_info is None else arguments[next(iter(result.alias_info.before_set))]
        for result in op._schema.returns
    ]

    def functionalize(mode: Any, _: Any, types: Any, args: Any, kwargs: Any) -> Any:
        values = values_by_name(schema, args, kwargs or {})
        written = [tensor for _, tensor in mutated_tensors(schema, args, kwargs or {})]
        results: Any = [None] * len(returned)
        if any("List[" in kind for kind in schema.returns):  # they may have any length
            described = functional_traces.untraced(mode, op, args, kwargs or {})
            results = described if len(returned) > 1 else [described]
        fresh = [result for result, name in zip(results, returned, strict=True) if name is None]
        outputs = len(written) + sum(len(r) if isinstance(r, list) else 1 for r in fresh)
        if not outputs:
            return None  # this call leaves out all that the operator would write into
        stand_in = _stand_in(op, schema, outputs, returned)
        traced = mode.__torch_dispatch__(stand_in, types, args, kwargs)
        produced = iter(traced if outputs > 1 else [traced])

        def fresh_result(result: Any) -> Any:
            return [next(produced) for _ in result] if isinstance(result, list) else next(produced)

        results = [
            fresh_result(result) if name is None else values[name]
            for result, name in zip(results, returned, strict=True)
        ]
        with mode:
            for tensor, value in zip(written, produced, strict=True):
                tensor.copy_(value)
        return tuple(results) if len(results) > 1 else next(iter(results), None)

    return functionalize


def _stand_in(
    op: OpOverload, schema: Schema, outputs: int, returned: Sequence[str | None]
) -> OpOverload:
    """The functional operator for calls that have so many outputs; made for the first of them."""
    wanted = StandIn(op, outputs)
    if wanted not in _overloads:
        original = op.name().replace("::", "_").replace(".", "_")
        name = f"torchop_export::{original}_{next(_numbers)}"
        text = functional_schema(schema, ["Tensor"] * outputs)
        into_copies = writing_into_copies(schema, op)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            *results, written = into_copies(*args, **kwargs)
            fresh = [r for r, argument in zip(results, returned, strict=True) if argument is None]
            tensors = tuple(tensor for _, tensor in named_outputs((*fresh, written)))
            return tensors if outputs > 1 else tensors[0]

        handle: Any = torchop.custom_op(name, kernel, schema=text, mutates_args=())
        handle.register_fake(kernel)
        _overloads[wanted] = handle.overload
        stand_ins[handle.overload] = wanted
    return _overloads[wanted]
