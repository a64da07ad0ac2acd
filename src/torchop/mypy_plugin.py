"""A mypy plugin for `torchop.operator` and `torchop.out_op`.

Add `plugins = torchop.mypy_plugin` to mypy's configuration. mypy then gives a class decorated with
`torchop.operator` the signature of its `forward` and the attributes of `CustomOp`. You need the
plugin because mypy ignores the return types of class decorators. Other type checkers work without
it, as does mypy for a plain call such as `torchop.operator(name)(cls)`.

`torchop.out_op` returns an operator family, which can be called without its `out` arguments. A
ParamSpec cannot express this, so mypy checks such calls only with the plugin.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_NAMED, ARG_NAMED_OPT, ARG_STAR, ARG_STAR2, Decorator, FuncDef, TypeInfo
from mypy.plugin import ClassDefContext, FunctionSigContext, MethodSigContext, Plugin
from mypy.types import (
    AnyType,
    CallableType,
    FunctionLike,
    Instance,
    NoneType,
    Parameters,
    TupleType,
    TypeOfAny,
    UnionType,
    get_proper_type,
)

_DECORATOR = "torchop._define.class_form.operator"
_HANDLE = "torchop._define.handle.CustomOp"
_FAMILY_CALL = "torchop._define.out_op.OperatorFamily.__call__"
_MARK = "torchop"


class OperatorPlugin(Plugin):
    """Infers the types of classes decorated with `torchop.operator`, and of operator families."""

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        return _mark if fullname in (_DECORATOR, "torchop.operator") else None

    def get_function_signature_hook(
        self, fullname: str
    ) -> Callable[[FunctionSigContext], FunctionLike] | None:
        symbol = self.lookup_fully_qualified(fullname)
        node = None if symbol is None else symbol.node
        if not isinstance(node, TypeInfo) or _MARK not in node.metadata:
            return None
        operator = node
        return lambda context: _call_signature(operator, context)

    def get_method_signature_hook(
        self, fullname: str
    ) -> Callable[[MethodSigContext], FunctionLike] | None:
        return _family_signature if fullname == _FAMILY_CALL else None


def plugin(version: str) -> type[Plugin]:
    """Return the plugin class. This is mypy's entry point."""
    return OperatorPlugin


def _mark(context: ClassDefContext) -> bool:
    any_type = AnyType(TypeOfAny.special_form)
    handle = context.api.named_type_or_none(_HANDLE, [any_type, any_type])
    if handle is None:
        return False  # mypy has not analyzed CustomOp yet, and will call this hook again
    info = context.cls.info
    info.metadata[_MARK] = {}
    # Make CustomOp the metaclass, because mypy looks up attributes that the class lacks in its
    # metaclass.
    info.metaclass_type = handle
    # Remove the decorator. Otherwise, mypy would also check whether the decorator accepts the class
    # as an argument.
    context.cls.decorators = [d for d in context.cls.decorators if d is not context.reason]
    return True


def _call_signature(operator: TypeInfo, context: FunctionSigContext) -> FunctionLike:
    for name in ("forward", "signature"):
        symbol = operator.get(name)
        node = None if symbol is None else symbol.node
        function = node.func if isinstance(node, Decorator) else node
        if isinstance(function, FuncDef) and function.type is not None:
            signature = get_proper_type(function.type)
            if isinstance(signature, CallableType):
                return signature.with_name(operator.name)
    # The class has no `forward` or `signature` from which to take the parameters, because it has a
    # string `schema` and one kernel per device instead. So accept any arguments.
    any_type = AnyType(TypeOfAny.special_form)
    return context.default_signature.copy_modified(
        arg_types=[any_type, any_type],
        arg_kinds=[ARG_STAR, ARG_STAR2],
        arg_names=[None, None],
        ret_type=any_type,
    )


def _is_tensor(type_: Instance) -> bool:
    return type_.type.name == "Tensor" and type_.type.fullname.startswith("torch.")


def _family_signature(context: MethodSigContext) -> FunctionLike:
    """Return the signature for calling an operator family, whose `out` arguments are optional."""
    default = context.default_signature
    family = get_proper_type(context.type)
    kernel = get_proper_type(family.args[0]) if isinstance(family, Instance) else None
    if not isinstance(kernel, Parameters) or kernel.is_ellipsis_args:
        return default
    types = [get_proper_type(argument) for argument in kernel.arg_types]
    kinds = list(kernel.arg_kinds)
    outputs = []
    for place, (kind, type_) in enumerate(zip(kinds, types, strict=True)):
        if kind == ARG_NAMED and isinstance(type_, Instance) and _is_tensor(type_):
            outputs.append(type_)
            kinds[place], types[place] = ARG_NAMED_OPT, UnionType([type_, NoneType()])
    several = context.api.named_generic_type("builtins.tuple", [AnyType(TypeOfAny.special_form)])
    result = outputs[0] if len(outputs) == 1 else TupleType([*outputs], several)
    return default.copy_modified(
        arg_types=types, arg_kinds=kinds, arg_names=kernel.arg_names, ret_type=result
    )
