"""ONNX nodes in the operator's own domain, for operators without a translation."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from torchop._compat.classes import FunctionSchema, OpOverload
from torchop._errors import SchemaError
from torchop._schema.schema import Schema

_VERSION = 1


def own_domain_node(op: OpOverload, schema: FunctionSchema, outputs: int) -> Callable[..., Any]:
    """A translation into one node: the namespace of the operator is its domain, the name its type.

    Tensors are inputs, those of lists one after the other; everything else is an attribute that has
    the name of the argument. Arguments that are None are left out.
    """
    parsed = Schema(schema)
    if any("List" in kind for kind in parsed.returns):
        raise SchemaError(
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
                raise SchemaError(
                    f"{op.name()}: the argument {argument.name!r} is a list of sizes that may "
                    "vary, which an attribute of an ONNX node cannot hold. Register a translation: "
                    "op.register_onnx(...)."
                )
            elif value is not None:
                attributes[argument.name] = _attribute(value)
        description = _description(onnx, op, names, attributes, outputs)
        opset = onnxscript.values.Opset(op.namespace, _VERSION)
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
        _VERSION,
        inputs=[parameter(name, f"T_{name}", param_option=optional) for name in names],
        outputs=[parameter(name, f"T_{name}") for name in results],
        type_constraints=[(f"T_{name}", types, "") for name in (*names, *results)],
        attributes=[
            onnx.defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, value), "")
            for name, value in attributes.items()
        ],
    )
