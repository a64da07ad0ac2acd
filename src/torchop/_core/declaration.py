"""`Declaration`: the checked input of a definition."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torchop._compat.classes import Tag
from torchop._errors import Place
from torchop._schema.convention import FLAT, Convention
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

# Checks the arguments of a call before the kernel runs.
Guard = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


class Site(NamedTuple):
    """Where an operator was defined. Two definitions by the same code have the same `origin`."""

    module: str
    qualname: str
    file: str
    line: int

    @classmethod
    def of(cls, function: Callable[..., Any], place: Place) -> Site:
        """Return the site of a function that the user's program made an operator at `place`."""
        code = getattr(function, "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code else (place.file, place.line)
        module = place.module or "__main__"
        qualname = getattr(function, "__qualname__", None)
        if qualname is None:
            # Partials and callable objects have the module of their class, so use the place.
            return cls(module, f"line {line}", file, line)
        return cls(getattr(function, "__module__", None) or module, qualname, file, line)

    @property
    def origin(self) -> tuple[str, str]:
        return self.module, self.qualname

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Declaration(NamedTuple):
    """The checked properties of an operator that is about to be defined.

    For another package's operator, only the name and the schema are set.

    Attributes:
        function: the kernel, which takes the schema's arguments.
        devices: the device types of the function; None stands for every device.
        fake: a fake kernel with a signature that needs no check.
        guard: checks the arguments of each call before any kernel.
        effect: the side effect, see `_rules.effect`.
        inlined: the compilers that trace the function, see `_rules.inlining`.
        launch: the kernel that launches Triton kernels; compilers trace `function` instead.
        residuals: the residuals, a `residuals.declared.Declared`, or None.
        convention: how to call the author's functions.
        is_helper: whether this helper operator replaces another operator in compiled graphs.
        is_lenient: whether calls behave as those of an inference engine's registration helper:
            results may share memory, and without a formula, PyTorch's autograd fallback runs.
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
    is_helper: bool = False
    is_lenient: bool = False
