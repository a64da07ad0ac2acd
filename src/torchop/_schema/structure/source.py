"""Source: a function that is written as text, line by line, and compiled once.

Every name in the text is one that is made here, or that `is_plain` allows. Text of users, such as
the names of their classes and keys, is a value that the function uses, never a part of its text.
"""

from __future__ import annotations

import builtins
import contextlib
import keyword
import linecache
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_NOT_IN_NAMES = re.compile(r"\W", re.ASCII)
_TAKEN = frozenset({*keyword.kwlist, *dir(builtins), "__builtins__"})
_TYPES = {id(value): name for name, value in vars(builtins).items() if isinstance(value, type)}


def is_plain(name: Any) -> bool:
    """Whether a name means itself, and nothing else, wherever it stands in source."""
    return (
        type(name) is str  # a subclass may write itself in another way
        and name.isascii()  # Python reads some other letters as ASCII ones
        and name.isidentifier()
        and not keyword.iskeyword(name)
        and name != "__debug__"
    )


class Source:
    """The text of one function, and the objects that it names.

    A loop over a description of the arguments would be made in every call, and unrolled by every
    trace. Text can be printed, stands in tracebacks, and costs what somebody would have written.

    Args:
        title: what tracebacks show in place of a file.
        parameters: the names of the function's parameters, all of them plain.
    """

    def __init__(self, title: str, parameters: Iterable[str] = ()) -> None:
        self._file = f"<torchop: {title}>"
        self._lines: list[str] = []
        self._indent = 0
        self._parameters = frozenset(parameters)
        assert all(map(is_plain, self._parameters))
        self._names = {*self._parameters, *_TAKEN}
        # Without a `__name__`: Dynamo would look for the objects in the module of that name.
        self._objects: dict[str, Any] = {"__builtins__": builtins}

    def line(self, text: str) -> None:
        self._lines.append("    " * self._indent + text)

    @contextlib.contextmanager
    def block(self, head: str) -> Iterator[None]:
        """Indents what is written inside it, below `head`."""
        self.line(head)
        self._indent += 1
        before = len(self._lines)
        yield
        if len(self._lines) == before:
            self.line("pass")
        self._indent -= 1

    def variable(self, hint: str) -> str:
        """A name that nothing else in the function has, as near to `hint` as that can be.

        The hint may be any text that starts with a letter of ours or an underscore.
        """
        name = stem = _NOT_IN_NAMES.sub("_", hint)
        number = 2
        while name in self._names:
            name, number = f"{stem}_{number}", number + 1
        self._names.add(name)
        return name

    def object(self, value: Any, hint: str | None = None) -> str:
        """The expression for an object that the function uses: a literal, or a name like `hint`."""
        builtin = _TYPES.get(id(value))
        if builtin is not None and builtin not in self._parameters:  # which may be called `type`
            return builtin
        if value is None or value is True or value is False or type(value) is str:
            return repr(value)
        if type(value) is int and value.bit_length() < 64:  # Python refuses to write very long ones
            return repr(value)
        for name, other in self._objects.items():
            if other is value:
                return name
        name = self.variable(f"_{hint or getattr(value, '__name__', 'value')}")
        self._objects[name] = value
        return name

    def attribute(self, value: str, name: str) -> str:
        """The expression for an attribute of a value."""
        if is_plain(name):
            return f"{value}.{name}"
        return f"{self.object(getattr)}({value}, {self.object(name)})"

    def keywords(self, arguments: Mapping[str, str]) -> str:
        """The keyword arguments of a call, by name."""
        return ", ".join(
            f"{name}={value}" if is_plain(name) else f"**{{{self.object(name)}: {value}}}"
            for name, value in arguments.items()
        )

    @property
    def text(self) -> str:
        return "\n".join(self._lines) + "\n"

    def function(self, name: str) -> Callable[..., Any]:
        """Compiles the text, and returns the function of this name that it defines."""
        text = self.text
        # Tracebacks and debuggers show the lines; a file that nothing can change is never stale.
        linecache.cache[self._file] = (len(text), None, text.splitlines(keepends=True), self._file)
        exec(compile(text, self._file, "exec"), self._objects)
        function: Callable[..., Any] = self._objects[name]
        return function
