from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torchop._compat.classes import Tag
from torchop._errors import Place
from torchop._schema.convention import FLAT, Convention
from torchop._schema.layouts import Layout
from torchop._schema.naming import OpName
from torchop._schema.schema import Schema

# A guard runs before the kernel, and raises an error if the arguments of the call are invalid.
Guard = Callable[[tuple[Any, ...], Mapping[str, Any]], None]


class Site(NamedTuple):
    module: str
    qualname: str
    file: str
    line: int

    @classmethod
    def of(cls, function: Callable[..., Any], place: Place) -> Site:
        """Return where `function` is defined, or `place` if the function has no code object."""
        code = getattr(function, "__code__", None)
        file, line = (code.co_filename, code.co_firstlineno) if code else (place.file, place.line)
        module = place.module or "__main__"
        qualname = getattr(function, "__qualname__", None)
        if qualname is None:
            # For a partial or a callable object, `__module__` is the module of its class. Use the
            # module that calls `custom_op` instead.
            return cls(module, f"line {line}", file, line)
        return cls(getattr(function, "__module__", None) or module, qualname, file, line)

    @property
    def origin(self) -> tuple[str, str]:
        """The function's module and name, which stay the same when the module is reloaded."""
        return self.module, self.qualname

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Declaration(NamedTuple):
    """The validated properties of an operator.

    For an operator from another package, only the name and the schema are set.

    Attributes:
        function: the kernel. It takes the arguments of the schema.
        devices: the device types that `function` supports. `(None,)` means every device.
        fake: the fake kernel. Its signature was already checked.
        guard: checks the arguments of each call before any kernel runs.
        effect: the declared side effect; see `_rules.effect`.
        inlined: the compilers that may trace into the function; see `_rules.inlining`.
        launch: for a `triton_op`, the function that eager calls run. Compilers trace the attribute
            `function` instead.
        priority: the names of the providers (alternative kernels), in the order that calls try
            them.
        residuals: the declared residuals (kernel outputs that only the backward pass uses), as a
            `residuals.declared.Declared`.
        convention: converts between the author's arguments and the arguments of the schema.
        layouts: the declared layouts of arguments, by name; see `_rules.layout`.
        functionalize: the rule for FunctionalTensorMode, only for the in-place or out= form of an
            operator. Instead of this form, the rule traces the functional operator and a copy of
            its result into the output.
        is_helper: True for an operator that replaces another one in compiled graphs.
        is_lenient: True for operators of `torchop.compat`. Inference engines rely on PyTorch's
            behavior for such operators: they may return aliases of their inputs, and without a
            registered backward formula, they use PyTorch's autograd fallback.
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
    priority: Sequence[str] = ()
    residuals: Any = None
    convention: Convention = FLAT
    layouts: Mapping[str, Layout] = MappingProxyType({})
    functionalize: Callable[..., Any] | None = None
    is_helper: bool = False
    is_lenient: bool = False
