"""Source: a function that is written as text, line by line, and compiled once."""

from __future__ import annotations

import builtins
import contextlib
import linecache
from collections.abc import Callable, Iterable, Iterator
from typing import Any


class Source:
    """The text of one function, and the objects that it names.

    A loop over a description of the arguments would be made in every call, and unrolled by every
    trace. Text can be printed, stands in tracebacks, and costs what somebody would have written.
    """

    def __init__(self, title: str, reserved: Iterable[str] = ()) -> None:
        self._file = f"<torchop: {title}>"
        self._lines: list[str] = []
        self._indent = 0
        reserved = set(reserved)
        # A parameter may be called `type`, or `list`.
        self._builtins = {n: v for n, v in vars(builtins).items() if n not in reserved}
        self._reserved = reserved | set(dir(builtins))
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
        """A name that nothing else in the function has, as near to `hint` as that can be."""
        name, number = hint, 2
        while name in self._reserved:
            name, number = f"{hint}_{number}", number + 1
        self._reserved.add(name)
        return name

    def object(self, value: Any, hint: str) -> str:
        """A name for an object that the function uses."""
        shown: str = getattr(value, "__name__", "")
        if isinstance(value, type) and self._builtins.get(shown) is value:
            return shown
        if value is None or value is True or value is False or type(value) in (int, str):
            return repr(value)
        for name, known in self._objects.items():
            if known is value:
                return name
        name = self.variable(f"_{hint}")
        self._objects[name] = value
        return name

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
