"""torchop.mypy_plugin: tells mypy that `torchop.operator` turns a class into an operator.

By itself, mypy ignores class decorators. In the configuration, `plugins = torchop.mypy_plugin`
makes it see an operator: calls have the parameters and the result of `forward`, and attributes are
those of `CustomOp`. Other checkers need no plugin, and neither does `torchop.operator(name)(cls)`.
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_STAR, ARG_STAR2, Decorator, FuncDef, TypeInfo
from mypy.plugin import ClassDefContext, FunctionSigContext, Plugin
from mypy.types import AnyType, CallableType, FunctionLike, TypeOfAny, get_proper_type

_DECORATOR = "torchop._define.class_form.operator"
_HANDLE = "torchop._define.handle.CustomOp"
_MARK = "torchop"


class OperatorPlugin(Plugin):
    """Gives decorated classes the type of operators."""

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


def plugin(version: str) -> type[Plugin]:
    """The entry point of the plugin, which mypy calls."""
    return OperatorPlugin


def _mark(context: ClassDefContext) -> bool:
    any_type = AnyType(TypeOfAny.special_form)
    handle = context.api.named_type_or_none(_HANDLE, [any_type, any_type])
    if handle is None:
        return False  # not analysed yet: mypy calls this again
    info = context.cls.info
    info.metadata[_MARK] = {}
    # Mypy looks on the metaclass for attributes that the class does not have.
    info.metaclass_type = handle
    # Or mypy would check the class as an argument of the decorator.
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
    # Kernels for devices, whose schema is a string.
    any_type = AnyType(TypeOfAny.special_form)
    return context.default_signature.copy_modified(
        arg_types=[any_type, any_type],
        arg_kinds=[ARG_STAR, ARG_STAR2],
        arg_names=[None, None],
        ret_type=any_type,
    )
