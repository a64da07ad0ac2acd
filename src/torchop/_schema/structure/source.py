"""Generate the source of a function line by line, and compile it.

A user-defined name, such as a field's name, is inserted into the source only if `is_plain` accepts
it. Everything else becomes a global variable of the generated code, with a generated name.
"""

from __future__ import annotations

import builtins
import contextlib
import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

_NOT_IN_NAMES = re.compile(r"\W", re.ASCII)
_RESERVED = frozenset({*keyword.kwlist, *dir(builtins), "__builtins__"})
_TYPES = {id(value): name for name, value in vars(builtins).items() if isinstance(value, type)}


def is_plain(name: Any) -> bool:
    """Return whether a name can be inserted into source code unchanged."""
    return (
        type(name) is str  # a subclass may override __format__
        and name.isascii()  # Python normalizes other letters, e.g. ligatures
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and name != "__debug__"
    )


class Source:
    """The source code of one generated function, and the objects that it uses.

    We generate code because a loop over the arguments would be slower, and because Dynamo would
    have to unroll it.

    In tracebacks, `title` and the operator's name appear in place of a file name.
    """

    def __init__(self, op: object, title: str, parameters: Iterable[str] = ()) -> None:
        self.op = op
        self._file = f"<torchop: {title} of {op}>"
        self._lines: list[str] = []
        self._indent = 0
        self._parameters = frozenset(parameters)
        assert all(map(is_plain, self._parameters))
        self._names = {*self._parameters, *_RESERVED}
        # The global variables of the generated code. They must not include `__name__`, because
        # Dynamo would then look up the variables in the module of that name.
        self._objects: dict[str, Any] = {"__builtins__": builtins}

    def line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        self.line(head)
        self._indent += 1
        before = len(self._lines)
        yield
        if len(self._lines) == before:
            self.line("pass")
        self._indent -= 1

    def condition(self, conditions: Sequence[str]) -> AbstractContextManager[None]:
        """Put a block inside an `if` statement, unless there are no conditions."""
        if not conditions:
            return contextlib.nullcontext()
        return self.block(f"if {' and '.join(conditions)}:")

    def variable(self, hint: str) -> str:
        name = stem = _NOT_IN_NAMES.sub("_", hint)
        number = 2
        while name in self._names:
            name, number = f"{stem}_{number}", number + 1
        self._names.add(name)
        return name

    def object(self, value: Any, hint: str | None = None) -> str:
        """Return an expression for an object: a literal, or the name of a global variable."""
        builtin = _TYPES.get(id(value))
        if builtin is not None and builtin not in self._parameters:
            return builtin
        if value is None or value is True or value is False or type(value) is str:
            return repr(value)
        if type(value) is int and value.bit_length() < 64:  # repr raises for very large ints
            return repr(value)
        for name, other in self._objects.items():
            if other is value:
                return name
        name = self.variable(f"_{hint or getattr(value, '__name__', 'value')}")
        self._objects[name] = value
        return name

    def where(self, path: str) -> str:
        """Return a literal for the start of error messages, such as `'lib::crop: cfg.box'`."""
        return repr(f"{self.op}: {path}")

    def attribute(self, value: str, name: str) -> str:
        if is_plain(name):
            return f"{value}.{name}"
        return f"{self.object(getattr)}({value}, {self.object(name)})"

    def keywords(self, arguments: Mapping[str, str]) -> str:
        return ", ".join(
            f"{name}={value}" if is_plain(name) else f"**{{{self.object(name)}: {value}}}"
            for name, value in arguments.items()
        )

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def function(self, name: str) -> Callable[..., Any]:
        text = self.text
        # Add the source to linecache, where tracebacks and debuggers find it. linecache never drops
        # an entry whose mtime is None.
        linecache.cache[self._file] = (len(text), None, text.splitlines(keepends=True), self._file)
        exec(compile(text, self._file, "exec"), self._objects)
        function: Callable[..., Any] = self._objects[name]
        return function
