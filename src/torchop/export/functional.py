"""Replaces operators that write by functional ones and copies.

PyTorch's own functional form of such a call, `auto_functionalized`, passes the operator as an
argument, which the exporter to ONNX cannot read. It also describes views. A copy into the argument
does not need that, because functionalization follows the copy through all views, as for PyTorch's
operators.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node

from torchop._compat.classes import FunctionalTensorMode, OpOverload
from torchop._core.contract import map_arguments, map_tensors
from torchop._core.registry import op_name, own_definition
from torchop._define.custom_op import custom_op
from torchop._errors import FunctionalizationError
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._schema.schema import Argument, Schema
from torchop._schema.text import arguments_of, without_writes, write, write_results


class Replacement(NamedTuple):
    """A functional operator that replaces one that writes.

    Attributes:
        op: the functional operator. It returns what the original returns besides its arguments,
            and then the new value of each tensor that the original writes into.
        original: the operator that writes.
        outputs: how many tensors the functional one returns.
    """

    op: OpOverload
    original: OpOverload
    outputs: int


def operators_in(program: ExportedProgram) -> dict[str, OpOverload]:
    """The operators that a program calls or passes as arguments, by name."""
    operators: dict[str, OpOverload] = {}
    for node in _nodes(program.graph_module):
        for value in (node.target, *node.args, *node.kwargs.values()):
            if isinstance(value, OpOverload):
                operators[value.name()] = value
    return operators


def is_replaced(op: OpOverload) -> bool:
    """Whether an operator writes, and only PyTorch's general form of functional calls fits it."""
    if op.namespace in ("aten", "prims") or not Schema(op._schema).is_mutable:
        return False
    definition = own_definition(op, op_name(op, "export"))
    # The forms that a family derives say themselves what stands for them.
    return (
        definition is None
        or FunctionalTensorMode not in definition.rule(TorchDispatchRule).functions
    )


def without_writing(program: ExportedProgram) -> tuple[ExportedProgram, list[Replacement]]:
    """A program in which functional operators and copies replace operators that write.

    The original program does not change.
    """
    for node in _nodes(program.graph_module):
        _refuse_functionalized(node)
    if not any(is_replaced(op) for op in operators_in(program).values()):
        return program, []
    graph_module = copy.deepcopy(program.graph_module)
    replacements: dict[str, Replacement] = {}
    for node in list(_nodes(graph_module)):
        if isinstance(node.target, OpOverload) and is_replaced(node.target):
            replacement = _replace(node, node.target)
            replacements[replacement.op.name()] = replacement
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            module.recompile()
    signature = copy.deepcopy(program.graph_signature)
    for spec, result in zip(signature.output_specs, _results(graph_module), strict=True):
        if isinstance(result, Node) and spec.arg.name != result.name:
            spec.arg = dataclasses.replace(spec.arg, name=result.name)
    changed = ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )
    return changed, list(replacements.values())


def _results(graph_module: GraphModule) -> tuple[Any, ...]:
    (output,) = (node for node in graph_module.graph.nodes if node.op == "output")
    return cast("tuple[Any, ...]", output.args[0])


def _nodes(graph_module: torch.nn.Module) -> Iterator[Node]:
    for module in graph_module.modules():
        if isinstance(module, GraphModule):
            yield from module.graph.nodes


def _refuse_functionalized(node: Node) -> None:
    if isinstance(node.target, OpOverload) or not callable(node.target):
        return
    for value in node.args:
        if isinstance(value, OpOverload):
            raise FunctionalizationError(
                f"the program was decomposed already, and passes {value.name()} to "
                f"{getattr(node.target, '__name__', node.target)}. Pass the program as "
                "torch.export.export returned it, without run_decompositions."
            )


# --------------------------------------------------------------------------------------------------
# One call


def _replace(node: Node, op: OpOverload) -> Replacement:
    """Writes the functional call and the copies in place of a call that writes."""
    schema = Schema(op._schema)
    written: list[Node] = []

    def note(argument: Argument, value: Any) -> Any:
        if argument.is_mutated:
            values = value if _is_list(value) else [value]
            written.extend(tensor for tensor in values if tensor is not None)
        return value

    args, kwargs = map_arguments(schema, node.args, node.kwargs, note)
    fresh = [r.alias_info is None for r in op._schema.returns]
    values: Any = node.meta.get("val")
    results: list[Any] = [] if not fresh else list(values) if len(fresh) > 1 else [values]
    kept = [result for result, is_fresh in zip(results, fresh, strict=True) if is_fresh]
    tensors = [tensor for value in kept for tensor in (value if _is_list(value) else [value])]
    if not all(isinstance(tensor, Tensor) for tensor in tensors):
        raise FunctionalizationError(
            f"{op.name()} writes into an argument and returns more than tensors, which no exported "
            "program can express. Return tensors instead, 0-dim for numbers."
        )
    outputs = len(tensors) + len(written)
    functional = _functional(op, schema, tuple(fresh), outputs)
    described = (*tensors, *(tensor.meta.get("val") for tensor in written))
    graph = node.graph
    with graph.inserting_before(node):
        call = graph.call_function(functional, args, kwargs)
        call.meta = {**node.meta, "val": described if outputs > 1 else described[0]}
        produced = [call]
        if outputs > 1:
            produced = [graph.call_function(operator.getitem, (call, i)) for i in range(outputs)]
            for item, value in zip(produced, described, strict=True):
                item.meta = {**node.meta, "val": value}
        for tensor, value in zip(written, produced[len(tensors) :], strict=True):
            copied = graph.call_function(torch.ops.aten.copy_.default, (tensor, value))
            copied.meta = {**node.meta, "val": tensor.meta.get("val")}
    _use_instead(node, _returned(op, node, results, fresh, iter(produced)))
    graph.erase_node(node)
    return Replacement(functional, op, outputs)


def _returned(
    op: OpOverload, node: Node, results: list[Any], fresh: list[bool], produced: Iterator[Node]
) -> Any:
    """What stands for the result of the call: new values, and the arguments that it returned."""
    arguments = {
        name: value
        for argument, value in (
            *zip(op._schema.arguments, node.args, strict=False),
            *((a, node.kwargs[a.name]) for a in op._schema.arguments if a.name in node.kwargs),
        )
        if argument.alias_info is not None
        for name in argument.alias_info.before_set
    }
    returned: list[Any] = []
    described: list[Any] = op._schema.returns
    for value, is_fresh, result in zip(results, fresh, described, strict=True):
        if not is_fresh:
            returned.append(arguments[next(iter(result.alias_info.before_set))])
        elif _is_list(value):
            returned.append([next(produced) for _ in value])
        else:
            returned.append(next(produced))
    return returned[0] if len(returned) == 1 else returned


def _use_instead(node: Node, value: Any) -> None:
    if isinstance(value, Node):
        node.replace_all_uses_with(value)
        return
    for user in list(node.users):  # which take one of several results
        _use_instead(user, value[cast(int, user.args[1])])
        user.graph.erase_node(user)


def _is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


# --------------------------------------------------------------------------------------------------
# The functional operators

_numbers = itertools.count()
# By the operator, which may be replaced by another one of its name, and the number of outputs.
_functionals: dict[tuple[OpOverload, int], OpOverload] = {}


def _functional(
    op: OpOverload, schema: Schema, fresh: tuple[bool, ...], outputs: int
) -> OpOverload:
    """The functional operator for calls that have so many outputs; made for the first of them.

    It lives as long as the process, for the programs in which it stands can be run.
    """
    if (op, outputs) not in _functionals:
        original = op.name().replace("::", "_").replace(".", "_")
        name = f"torchop_export::{original}_{next(_numbers)}"
        arguments = map(without_writes, arguments_of(schema.written))
        text = write(arguments, write_results(["Tensor"] * outputs))
        kernel = _writing_into_copies(op, schema, fresh)
        handle: Any = custom_op(name, kernel, schema=text, mutates_args=())
        handle.register_fake(kernel)
        _functionals[op, outputs] = handle.overload
    return _functionals[op, outputs]


def _writing_into_copies(
    op: OpOverload, schema: Schema, fresh: tuple[bool, ...]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        written: list[Tensor] = []

        def copied(argument: Argument, tensor: Tensor) -> Tensor:
            if not argument.is_mutated:
                return tensor
            written.append(tensor.clone())
            return written[-1]

        args, kwargs = map_tensors(schema, args, kwargs, copied)
        returned = op(*args, **kwargs)
        results = returned if len(fresh) > 1 else [returned] * len(fresh)
        tensors = [
            tensor
            for result, is_fresh in zip(results, fresh, strict=True)
            if is_fresh
            for tensor in (result if _is_list(result) else [result])
        ]
        outputs = (*tensors, *written)
        return outputs if len(outputs) > 1 else outputs[0]

    return kernel
