"""onnx: exports a program to ONNX, with the translations of its operators."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

import torchop
from torchop.export.functional import operators_in, stand_ins, without_writing
from torchop.extend import Operator, OpOverload, Schema, short_repr

# What PyTorch's exporter has translations for, or takes apart.
_PYTORCHS_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "torchvision", "quantized_decomposed", "onnx", "onnx_symbolic"}
)
_DOMAIN_VERSION = 1  # of nodes in the domain of an operator
Translation = Callable[..., Any]


def onnx(
    program_or_module: ExportedProgram | torch.nn.Module,
    args: tuple[Any, ...] = (),
    f: str | os.PathLike[str] | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    missing: Literal["error", "node"] = "error",
    custom_translation_table: Mapping[Callable[..., Any], Translation] | None = None,
    **options: Any,
) -> Any:
    """Exports a program to ONNX, with the translations that `register_onnx` registered.

    It calls `torch.onnx.export`. Operators that write into arguments are replaced by functional
    ones and copies, so their translations return new values. Needs onnx and onnxscript.

    Args:
        program_or_module: an exported program, or a module to export.
        args: the positional arguments to export a module with.
        f: a path to write the model to.
        kwargs: the keyword arguments to export a module with.
        dynamic_shapes: which sizes may vary, as in `torch.export.export`.
        missing: what to do for an operator without a translation: `"error"`, or `"node"` for a node
            whose domain is the operator's namespace, for a runtime that knows the operator.
        custom_translation_table: translations to use instead of the registered ones, as in
            `torch.onnx.export`.
        options: the other options of `torch.onnx.export`, such as `input_names`.

    Returns:
        A `torch.onnx.ONNXProgram`.

    Raises:
        MissingRuleError: an operator has no translation; names it.
        ResultError: a translation did not return what the operator returns.
        FunctionalizationError: the program was decomposed already, and an operator in it writes.
        EffectError: an operator has an effect, such as logging, which ONNX cannot express.
        ValueError: `missing` is not one of these.
        TypeError: a module that takes arguments, without any.

    Example:
        >>> import torch, torchop, torchop.export
        >>> @torchop.custom_op("docs::squared_relu", mutates_args=())
        ... def squared_relu(x: torch.Tensor) -> torch.Tensor:
        ...     return x.relu() ** 2
        >>> _ = squared_relu.register_fake(lambda x: torch.empty_like(x))
        >>> @squared_relu.register_onnx
        ... def _(x):
        ...     from onnxscript import opset20 as op
        ...     return op.Mul(op.Relu(x), op.Relu(x))
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return squared_relu(x)
        >>> program = torchop.export.onnx(Model(), (torch.ones(2),))  # doctest: +SKIP
        >>> [node.op_type for node in program.model.graph]  # doctest: +SKIP
        ['Relu', 'Relu', 'Mul']

    The idea is `torch.onnx.export`, and its `custom_translation_table`.
    """
    if missing not in ("error", "node"):
        raise ValueError(f"missing is 'error' or 'node', got {short_repr(missing)}.")
    program = program_or_module
    if not isinstance(program, ExportedProgram):
        try:
            program = torch.export.export(
                program, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
            )
        except TypeError as error:
            if args or kwargs:
                raise
            raise TypeError(
                f"onnx({type(program).__name__}): a module is exported with the arguments of a "
                f"call, as in onnx(module, (x,)), but there are none: {error}."
            ) from None
    own_table = dict(custom_translation_table or {})
    by_name = {getattr(op, "_name", None): function for op, function in own_table.items()}
    for name in operators_in(program):
        if Operator(name, "onnx").effect is not None:
            raise torchop.EffectError(
                f"{name} has an effect, which ONNX cannot express. Leave it out of the model "
                "that you export."
            )
    program = without_writing(program)
    rule = torchop.get_rule("onnx")
    table: dict[Callable[..., Any], Translation] = {}
    for op in operators_in(program).values():
        stand_in = stand_ins.get(op)
        original, outputs = stand_in or (op, len(op._schema.returns))
        function = by_name.get(original.name())
        if function is None and rule.has(original):
            function = rule.lookup(original)
        elif stand_in is None and function is not None:
            continue  # as it is in the caller's own table
        if function is not None:
            table[op] = _counted(original, function, outputs)
        elif _needs_translation(op):
            if missing == "error":
                raise _missing(original)
            table[op] = _own_domain_node(original, op._schema, outputs)
    table |= own_table
    try:
        return torch.onnx.export(
            program,
            f=f,
            dynamo=True,
            custom_translation_table=table,
            **{"verbose": False, **options},
        )
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, (torchop.MissingRuleError, torchop.ResultError)):
                raise cause from None
        raise


def _counted(op: OpOverload, translation: Translation, outputs: int) -> Translation:
    returns_list = outputs == 1 and "List[Tensor]" in Schema(op._schema).returns

    def translate(*args: Any, **kwargs: Any) -> Any:
        result = translation(*args, **kwargs)
        if returns_list:
            return result
        values = result if isinstance(result, (list, tuple)) else (result,)
        returned = len(values)
        if returned != outputs:
            raise torchop.ResultError(
                f"{op.name()}: the ONNX translation returned {returned} values, and has to return "
                f"{outputs}: what {op._schema} returns besides its arguments, and then the new "
                "value of each argument that it writes into."
            )
        return values if outputs > 1 else values[0]

    return translate


def _needs_translation(op: OpOverload) -> bool:
    is_composite = Operator(op.name(), "onnx").has_kernel("CompositeImplicitAutograd")
    return op.namespace not in _PYTORCHS_NAMESPACES and not is_composite


def _missing(op: OpOverload) -> torchop.MissingRuleError:
    return torchop.MissingRuleError(
        f"{op.name()} has no ONNX translation. Register one: op.register_onnx(translation), or for "
        f"an operator without a handle torchop.get_rule('onnx').register({op.name()!r}, "
        "translation); or pass missing='node' for a runtime that knows the operator."
    )


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


# --------------------------------------------------------------------------------------------------
# Nodes in the operator's own domain, for operators without a translation


def _own_domain_node(op: OpOverload, schema: torch.FunctionSchema, outputs: int) -> Translation:
    """A translation into one node: the namespace of the operator is its domain, the name its type.

    Tensors are inputs, those of lists one after the other; everything else is an attribute that has
    the name of the argument. Arguments that are None are left out.
    """
    parsed = Schema(schema)
    if any("List" in kind for kind in parsed.returns):
        raise torchop.SchemaError(
            f"{op.name()} returns a list, so there is no ONNX node for it: the number of its "
            "outputs is not known. Register a translation: op.register_onnx(...)."
        )

    def translate(*args: Any, **kwargs: Any) -> Any:
        # Whoever calls this has both, but not every program that imports torchop.
        onnx, onnxscript = map(importlib.import_module, ("onnx", "onnxscript"))
        args, kwargs = parsed.fill_defaults(args, kwargs)
        values = dict(zip([a.name for a in parsed.positional], args, strict=True)) | kwargs
        inputs: list[Any] = []
        names: list[str] = []
        attributes: dict[str, Any] = {}
        for argument in parsed.arguments:
            value = values[argument.name]
            if argument.is_tensor_list and isinstance(value, (list, tuple)):
                inputs += value
                names += [f"{argument.name}_{index}" for index in range(len(value))]
                attributes[f"{argument.name}_size"] = len(value)
            elif _is_value(value) or "Tensor" in argument.kind:
                inputs.append(value)
                names.append(argument.name)
            elif isinstance(value, (list, tuple)) and any(map(_is_value, value)):
                raise torchop.SchemaError(
                    f"{op.name()}: the argument {argument.name!r} is a list of sizes that may "
                    "vary, which an attribute of an ONNX node cannot hold. Register a translation: "
                    "op.register_onnx(...)."
                )
            elif value is not None:
                attributes[argument.name] = _attribute(value)
        description = _description(onnx, op, names, attributes, outputs)
        opset = onnxscript.values.Opset(op.namespace, _DOMAIN_VERSION)
        return onnxscript.values.Op(opset, description.name, description)(*inputs, **attributes)

    return translate


def _is_value(value: object) -> bool:
    return not isinstance(
        value, (type(None), bool, int, float, str, list, tuple, torch.dtype, torch.device)
    )


def _attribute(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, (list, tuple)):
        return [_attribute(item) for item in value]
    return value


def _description(
    onnx: Any, op: OpOverload, names: list[str], attributes: dict[str, Any], outputs: int
) -> Any:
    """What onnxscript has to know of an operator before it makes a node."""
    parameter = onnx.defs.OpSchema.FormalParameter
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    dtypes = map(onnx.helper.tensor_dtype_to_string, onnx.helper.get_all_tensor_dtypes())
    types = [f"tensor({name.rpartition('.')[2].lower()})" for name in dtypes]
    results = [f"output_{index}" for index in range(outputs)]
    local = op.name().partition("::")[2].replace(".", "_")
    return onnx.defs.OpSchema(
        local,
        op.namespace,
        _DOMAIN_VERSION,
        inputs=[parameter(name, f"T_{name}", param_option=optional) for name in names],
        outputs=[parameter(name, f"T_{name}") for name in results],
        type_constraints=[(f"T_{name}", types, "") for name in (*names, *results)],
        attributes=[
            onnx.defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, value), "")
            for name, value in attributes.items()
        ],
    )
