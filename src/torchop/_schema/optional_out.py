"""Maybe-out functions: those that return their `out` argument, or allocate where it is None.

Whether the result of such a function is fresh depends on its arguments, and no schema can say that.
A mutated `Optional[Tensor]` beside a result that has nothing to do with it is another matter.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torchop._compat.classes import FunctionSchema
from torchop._errors import SchemaError

WHY_AND_FIX = (
    "Whether such a result is fresh depends on the arguments, and no schema can say that. Make it "
    "two operators: one that always allocates, and one with out=. torchop.out_op makes both of a "
    "kernel that writes into out, and torchop.maybe_out makes one Python function of both, with "
    "out=None."
)


def check_maybe_out(name: object, parsed: FunctionSchema, function: Callable[..., Any]) -> None:
    """Refuses an operator that may return one of its mutated optional tensors."""
    if not parsed.is_mutable or not parsed.returns:
        return
    optional = {
        argument.name: argument.alias_info.before_set
        for argument in parsed.arguments
        if argument.alias_info is not None
        and argument.alias_info.is_write
        and str(argument.real_type) == "Optional[Tensor]"
    }
    if not optional or not any("Tensor" in str(result.real_type) for result in parsed.returns):
        return
    declared = {
        alias
        for result in parsed.returns
        if result.alias_info is not None
        for alias in result.alias_info.before_set
    }
    returned = _names_returned(function)
    for argument, alias in optional.items():
        if argument in returned or declared & alias:
            raise SchemaError(
                f"{name} is maybe-out: it may return its mutated argument {argument!r}, or "
                f"another tensor where that is None. {WHY_AND_FIX} Got {parsed}."
            )


def _names_returned(function: Callable[..., Any]) -> set[str]:
    """The names that the `return` statements of a function may hand out, as far as one can see.

    What they do not show (no source, or a detour through another variable) is found by the check of
    what a kernel returned.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return set()
    defined = next((n for n in ast.walk(tree) if isinstance(n, _FUNCTIONS)), None)
    return set() if defined is None else {n for e in _returns(defined) for n in _results(e)}


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _returns(node: ast.AST) -> Iterator[ast.expr]:
    """What a function returns; not what the functions inside it do."""
    if isinstance(node, ast.Lambda):
        yield node.body
        return
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return) and child.value is not None:
            yield child.value
        elif not isinstance(child, _FUNCTIONS):
            yield from _returns(child)


def _results(expression: ast.expr) -> Iterator[str]:
    """The variables that may be the value of an expression, or a part of it."""
    parts: list[ast.expr] = []
    match expression:
        case ast.Name(id=name):
            yield name
        case ast.IfExp(body=body, orelse=orelse):
            parts = [body, orelse]
        case ast.BoolOp(values=parts) | ast.Tuple(elts=parts) | ast.List(elts=parts):
            pass
        case ast.NamedExpr(value=value):
            parts = [value]
        case ast.Call(func=method, keywords=keywords):
            # By PyTorch's conventions these return a tensor that they were given.
            parts = [keyword.value for keyword in keywords if keyword.arg == "out"]
            if isinstance(method, ast.Attribute) and method.attr.endswith("_"):
                parts.append(method.value)
    for part in parts:
        yield from _results(part)
