"""onnx: exports a program to ONNX, with the translations of its operators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch.export import ExportedProgram

from torchop._compat import dispatch, registries
from torchop._compat.classes import OpOverload
from torchop._errors import EffectError, MissingRuleError, ResultError, short_repr
from torchop._rules.user.onnx import ONNX
from torchop._schema.schema import Schema
from torchop.export.functional import operators_in, stand_ins, without_writing
from torchop.export.own_domain import own_domain_node

# What PyTorch's exporter has translations for, or takes apart.
_PYTORCHS_NAMESPACES = frozenset(
    {"aten", "prim", "prims", "torchvision", "quantized_decomposed", "onnx", "onnx_symbolic"}
)
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
        program = torch.export.export(
            program, args, dict(kwargs or {}), dynamic_shapes=dynamic_shapes, strict=False
        )
    own_table = dict(custom_translation_table or {})
    by_name = {getattr(op, "_name", None): function for op, function in own_table.items()}
    for name in operators_in(program):
        if registries.effect_of(name) is not None:
            raise EffectError(
                f"{name} has an effect, which ONNX cannot express. Leave it out of the model "
                "that you export."
            )
    program = without_writing(program)
    table: dict[Callable[..., Any], Translation] = {}
    for op in operators_in(program).values():
        stand_in = stand_ins.get(op)
        original, outputs = stand_in or (op, len(op._schema.returns))
        function = by_name.get(original.name())
        if function is None and ONNX.has(original):
            function = ONNX.lookup(original)
        elif stand_in is None and function is not None:
            continue  # as it is in the caller's own table
        if function is not None:
            table[op] = _counted(original, function, outputs)
        elif _needs_translation(op):
            if missing == "error":
                raise _missing(original)
            table[op] = own_domain_node(original, op._schema, outputs)
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
            if isinstance(cause, (MissingRuleError, ResultError)):
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
            raise ResultError(
                f"{op.name()}: the ONNX translation returned {returned} values, and has to return "
                f"{outputs}: what {op._schema} returns besides its arguments, and then the new "
                "value of each argument that it writes into."
            )
        return values if outputs > 1 else values[0]

    return translate


def _needs_translation(op: OpOverload) -> bool:
    return op.namespace not in _PYTORCHS_NAMESPACES and not dispatch.has_kernel(
        op.name(), "CompositeImplicitAutograd"
    )


def _missing(op: OpOverload) -> MissingRuleError:
    return MissingRuleError(
        f"{op.name()} has no ONNX translation. Register one: op.register_onnx(translation), or for "
        f"an operator without a handle torchop.get_rule('onnx').register({op.name()!r}, "
        "translation); or pass missing='node' for a runtime that knows the operator."
    )


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
