"""Small changes of a function, as edits of its text, so that they can be shown as a diff."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

_OPERATORS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "%"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    # Boundaries, and what is the case where it was not.
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
}
# Methods of tensors whose result can stand for the tensor, so that a call can be left out.
_OPTIONAL_METHODS = {
    *("abs", "clone", "conj", "contiguous", "detach", "double", "expand", "expand_as", "float"),
    *("half", "resolve_conj", "resolve_neg", "sum_to_size", "to", "type_as"),
}
_SIMILAR_NAMES = {
    name: other
    for pair in (
        "amax amin",
        "argmax argmin",
        "ceil floor",
        "cos sin",
        "cummax cummin",
        "max min",
        "maximum minimum",
        "mean sum",
        "ones zeros",
        "ones_like zeros_like",
    )
    for name, other in (pair.split(), pair.split()[::-1])
}
_OPTIONAL_KEYWORDS = {"device", "dtype", "keepdim", "layout", "memory_format"}
# Calls whose arguments are not of the same kind, though both are names.
_ORDERED = {"getattr", "hasattr", "isinstance", "issubclass"}
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Edit(NamedTuple):
    """Bytes of a text, what they become, and what that means."""

    start: int
    end: int
    new: str
    what: str

    def apply(self, text: bytes) -> bytes:
        return text[: self.start] + self.new.encode() + text[self.end :]


def edits_of(text: bytes, function: Definition, role: str) -> list[Edit]:
    """The changes of a function, in the order of the text; `role` is what the operator has it for.

    Messages of exceptions, docstrings and annotations stay as they are.
    """
    editor = _Editor(text, returns_gradients=role == "backward")
    found = dict.fromkeys(editor.of_function(function))
    return sorted(found, key=lambda edit: edit.start)


class _Editor:
    def __init__(self, text: bytes, returns_gradients: bool) -> None:
        self._text, self._returns_gradients = text, returns_gradients
        self._lines = [0]
        for line in text.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))

    def of_function(self, function: Definition) -> Iterator[Edit]:
        if isinstance(function, ast.Lambda):
            yield from self._of_returned(function.body)
            yield from self._of(function.body)
            return
        for statement in function.body:
            yield from self._of(statement)
        for returned in _returned(function.body):
            yield from self._of_returned(returned)

    # Any, because not every node has a place, though every expression and statement does.
    def _start(self, node: Any) -> int:
        start: int = self._lines[node.lineno - 1] + node.col_offset
        return start

    def _end(self, node: Any) -> int:
        end: int = self._lines[node.end_lineno - 1] + node.end_col_offset
        return end

    def _source(self, node: ast.AST) -> str:
        return self._text[self._start(node) : self._end(node)].decode()

    def _replaced(self, node: ast.AST, new: str, what: str) -> Edit:
        return Edit(self._start(node), self._end(node), new, what)

    def _of(self, node: ast.AST) -> Iterator[Edit]:
        """The changes of a node, and of those in it."""
        if isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments)):
            return
        if isinstance(node, Definition):
            yield from self.of_function(node)
            return
        match node:
            case ast.Expr(value=ast.Constant()):  # a docstring, or `...`
                return
            case ast.BinOp(left=left, op=op, right=right):
                yield from self._operator(left, op, right)
            case ast.AugAssign(target=left, op=op, value=right):
                yield from self._operator(left, op, right)
                yield self._replaced(node, "pass", "statement left out")
            case ast.BoolOp(op=op, values=values):
                yield from self._operator(values[0], op, values[1])
            case ast.Compare(left=left, ops=ops, comparators=rights):
                for compared, before, after in zip(ops, [left, *rights], rights, strict=False):
                    yield from self._operator(before, compared, after)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(number))):
                yield self._replaced(node, str(1 - number), f"-{number} to {1 - number}")
                return
            case ast.UnaryOp(op=ast.USub() | ast.Not() as op):
                symbol = "-" if isinstance(op, ast.USub) else "not"
                new = self._source(node)[len(symbol) :].lstrip()
                yield self._replaced(node, new, f"{symbol} left out")
            case ast.Constant(value=bool(value)):
                yield self._replaced(node, str(not value), f"{value} to {not value}")
            case ast.Constant(value=int() | float() as value):
                if value + 1 != value:  # infinities stay
                    yield self._replaced(node, repr(value + 1), f"{value} to {value + 1}")
            case ast.If(test=test) | ast.IfExp(test=test):
                yield self._replaced(test, "True", "condition always true")
                yield self._replaced(test, "False", "condition always false")
            case ast.While(test=test):
                yield self._replaced(test, "False", "condition always false")
            case ast.Expr() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield self._replaced(node, "pass", "statement left out")
            case ast.Call():
                yield from self._of_call(node)
        for field, value in ast.iter_fields(node):
            if field not in ("annotation", "decorator_list", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        yield from self._of(child)

    def _operator(self, left: ast.AST, op: ast.AST, right: ast.AST) -> Iterator[Edit]:
        old, new = _OPERATORS.get(type(op), ("", ""))
        start = self._text.find(old.encode(), self._end(left), self._start(right))
        if old and start >= 0:
            yield Edit(start, start + len(old), new, f"{old} to {new}")

    def _of_call(self, call: ast.Call) -> Iterator[Edit]:
        name = ""
        match call.func:
            case ast.Attribute(attr=name):
                start = self._end(call.func) - len(name)
                if name in _OPTIONAL_METHODS:
                    value = self._text[self._start(call) : start].decode().rstrip()
                    yield self._replaced(
                        call, value.removesuffix(".").rstrip(), f".{name}() left out"
                    )
                if similar := _SIMILAR_NAMES.get(name):
                    yield Edit(start, start + len(name), similar, f"{name} to {similar}")
            case ast.Name(id=name):
                pass
        for one, other in itertools.pairwise(call.args):
            if type(one) is type(other) and name not in _ORDERED:
                yield from self._swapped(one, other, "arguments swapped")
        arguments = sorted((*call.args, *call.keywords), key=self._start)
        for index, keyword in enumerate(arguments):
            if isinstance(keyword, ast.keyword) and keyword.arg in _OPTIONAL_KEYWORDS:
                if index:
                    start, end = self._end(arguments[index - 1]), self._end(keyword)
                else:
                    start = self._start(keyword)
                    end = self._start(arguments[1]) if arguments[1:] else self._end(keyword)
                yield Edit(start, end, "", f"{keyword.arg}= left out")

    def _swapped(self, one: ast.expr, other: ast.expr, what: str) -> Iterator[Edit]:
        first, second = self._source(one), self._source(other)
        if first != second:
            between = self._text[self._end(one) : self._start(other)].decode()
            new = f"{second}{between}{first}"
            yield Edit(self._start(one), self._end(other), new, what)

    def _of_returned(self, value: ast.expr) -> Iterator[Edit]:
        parts = value.elts if isinstance(value, ast.Tuple) else [value]
        for one, other in itertools.pairwise(parts):
            yield from self._swapped(one, other, "results swapped")
        for part in parts if self._returns_gradients else ():
            if not isinstance(part, ast.Constant | ast.Starred):
                yield self._replaced(part, "None", "gradient None")
                yield self._replaced(part, f"0 * ({self._source(part)})", "gradient zero")


def _returned(body: list[ast.stmt]) -> Iterator[ast.expr]:
    """What a function returns, without what functions inside of it do."""
    nodes: list[ast.AST] = list(body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value
        elif not isinstance(node, Definition | ast.ClassDef):
            nodes.extend(ast.iter_child_nodes(node))
