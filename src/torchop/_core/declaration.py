"""The declaration of an operator, before it is defined."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchop._compat.classes import Tag
from torchop._errors import Place
from torchop._schema.convention import FLAT, Convention
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

# Looks at the arguments of a call before the kernel runs, and raises where it must not.
Guard = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


class Site(NamedTuple):
    """Where an operator was defined: two definitions by the same code have the same origin."""

    module: str
    qualname: str
    file: str
    line: int

    @classmethod
    def of(cls, function: Callable[..., Any], place: Place) -> Site:
        """That of a function, which a line of the user's program makes an operator."""
        code = getattr(function, "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code else (place.file, place.line)
        module = place.module or "__main__"
        qualname = getattr(function, "__qualname__", None)
        if qualname is None:
            # A partial or a callable object: its module is that of its class, and says nothing.
            return cls(module, f"line {line}", file, line)
        return cls(getattr(function, "__module__", None) or module, qualname, file, line)

    @property
    def origin(self) -> tuple[str, str]:
        return self.module, self.qualname

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Declaration(NamedTuple):
    """All that is known of an operator before it is defined, and checked.

    Of an operator that somebody else defined, it is the name and the schema.

    Attributes:
        function: the kernel it is made from, which is called with the schema's arguments.
        devices: the device types that the function is for; None stands for every device.
        fake: its fake kernel, which is known to be right.
        guard: looks at the arguments of each call before any kernel.
        effect: its side effect; `_rules` knows which there are.
        inlined: the compilers that trace the function, as `_rules.inlining` represents them.
        launch: the kernel of a function that launches Triton kernels; the function itself is for
            compilers to trace.
        residuals: its residuals, a `residuals.declared.Declared`; None if it has none.
        convention: how the functions of its author are called.
        is_companion: whether it stands for another operator in compiled graphs.
        is_lenient: whether calls do what those of the helper of an engine do: results may share
            memory, and without a formula, PyTorch's fallback for autograd runs.
    """

    name: OpName
    schema: Schema
    function: Callable[..., Any] | None = None
    site: Site | None = None
    devices: tuple[str | None, ...] = (None,)
    tags: tuple[Tag, ...] = ()
    fake: Callable[..., Any] | None = None
    guard: Guard | None = None
    effect: Any = None
    inlined: Any = None
    launch: Callable[..., Any] | None = None
    residuals: Any = None
    convention: Convention = FLAT
    is_companion: bool = False
    is_lenient: bool = False
