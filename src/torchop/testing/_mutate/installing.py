"""A function with changed code: where its text is, and how the code is replaced."""

from __future__ import annotations
import __future__

import ast
import contextlib
import difflib
import linecache
import types
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchop.testing._mutate.edits import Definition, Edit, edits_of

_FUTURES = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


class CannotChangeError(Exception):
    """Why a function cannot be changed."""


@dataclass(frozen=True)
class Mutant:
    """A change of one function.

    Attributes:
        function: the qualified name of the function.
        role: what the operator has it for, such as `"backward"`.
        file: where its source is.
        line: the line that is changed.
        change: what is changed, in a few words.
        diff: the change as a unified diff.
    """

    function: str
    role: str
    file: str
    line: int
    change: str
    diff: str


def mutants_of(function: types.FunctionType, role: str) -> Iterator[tuple[Mutant, types.CodeType]]:
    """The changes of a function, each with the code that the function would have.

    The whole file is compiled with each change, because only then does the code have the variables
    that it closes over.

    Raises:
        CannotChangeError: there is no source of what runs.
    """
    code = function.__code__
    file = code.co_filename
    text = "".join(linecache.getlines(file, function.__globals__)).encode()
    if not text:
        raise CannotChangeError(f"the source is not to be found ({file})")
    try:
        places = [place for place, each in _codes(_compiled(text, code)) if each == code]
    except (SyntaxError, ValueError) as error:
        raise CannotChangeError(f"the source cannot be read: {error}") from None
    if not places:
        raise CannotChangeError(
            "its source is not what runs: it changed after the import, or something, such as "
            "pytest in tests with assert, rewrote it"
        )
    definitions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, Definition))
    nodes = [node for node in definitions if _is_of(node, code)]
    if len(nodes) != 1 or len(places) != 1:
        raise CannotChangeError("there are two such functions on its line")
    for edit in edits_of(text, nodes[0], role):
        changed = _changed(text, code, places[0], edit)
        if changed is not None and _meaning(changed) != _meaning(code):
            yield _described(function, role, text, edit), changed


@contextlib.contextmanager
def installed(function: types.FunctionType, code: types.CodeType) -> Iterator[None]:
    """A block in which a function has other code; however it ends, the function gets its own back.

    Whoever holds the function, such as a rule, a decorator or a method, runs the other code, and
    its defaults and the variables that it closes over stay.
    """
    before = function.__code__
    try:
        function.__code__ = code
        yield
    finally:
        function.__code__ = before


def _compiled(text: bytes, like: types.CodeType) -> types.CodeType:
    flags = like.co_flags & _FUTURES  # which a notebook or a doctest has from an earlier block
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a change such as `1 is 2`
        code: types.CodeType = compile(text, like.co_filename, "exec", flags, dont_inherit=True)
        return code


def _codes(module: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    """The functions of a module by the names around them, and by number among those of one name."""
    numbers: Counter[str] = Counter()
    stack = [("", module)]
    while stack:
        around, code = stack.pop(0)
        name = f"{around}.{code.co_name}"  # without co_qualname, which Python 3.10 has not
        yield (name, numbers[name]), code
        numbers[name] += 1
        stack += [(name, each) for each in code.co_consts if isinstance(each, types.CodeType)]


def _meaning(code: types.CodeType) -> list[object]:
    """What code does, without the places of its text."""
    constants = [_meaning(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return [code.co_code, code.co_names, code.co_varnames, constants]


def _is_of(node: Definition, code: types.CodeType) -> bool:
    """Whether a definition is that of the code."""
    if isinstance(node, ast.Lambda):
        body = node.body
        place = body.lineno, body.end_lineno, body.col_offset, body.end_col_offset
        # Which of the lambdas of a line it is, the places of its instructions tell, but not in
        # Python 3.10, where two of them are one too many.
        places = getattr(code, "co_positions", None)
        is_there = node.lineno == code.co_firstlineno if places is None else place in {*places()}
        return code.co_name == "<lambda>" and is_there
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return (node.name, first) == (code.co_name, code.co_firstlineno)


def _changed(
    text: bytes, before: types.CodeType, place: tuple[str, int], edit: Edit
) -> types.CodeType | None:
    """The code of the function with a change; None if there is no such code."""
    names = ", ".join([*before.co_freevars, ""])
    # What the change no longer uses is used where nothing runs, so that the function still closes
    # over it: otherwise it could not be given the code. First in an expression, then a statement.
    for new in (edit.new, f"({edit.new} if True else ({names}))", f"if False: ({names})"):
        try:
            codes = dict(_codes(_compiled(edit._replace(new=new).apply(text), before)))
        except (SyntaxError, ValueError):
            continue
        code = codes.get(place)
        if code is not None and code.co_freevars == before.co_freevars:
            return code
    return None


def _described(function: types.FunctionType, role: str, text: bytes, edit: Edit) -> Mutant:
    file = function.__code__.co_filename
    name = Path(file).name if Path(file).is_file() else file
    before, after = (t.decode().splitlines(keepends=True) for t in (text, edit.apply(text)))
    diff = "".join(difflib.unified_diff(before, after, name, f"{name}, changed", n=1))
    line = text[: edit.start].count(b"\n") + 1
    return Mutant(function.__qualname__, role, file, line, edit.what, diff)
