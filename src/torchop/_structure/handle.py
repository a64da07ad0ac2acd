"""The handle of an operator whose arguments or results have a structure."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torchop import _compat
from torchop._definition import Definition
from torchop._operator import CustomOp, P, R

if TYPE_CHECKING:
    from torchop._structure.structure import Structure


class StructuredDefinition(Definition):
    """A definition that knows the structure behind its flat schema."""

    __slots__ = ("structure",)

    def __init__(self, structure: Structure, /, *args: Any, **kwargs: Any) -> None:
        self.structure = structure
        super().__init__(*args, **kwargs)


class StructuredOp(CustomOp[P, R]):
    """A handle that is called with objects; `overload` is the flat operator underneath.

    Attributes:
        source: the text of the function that a call runs.
    """

    def __init__(self, definition: StructuredDefinition) -> None:
        super().__init__(definition)
        structure = definition.structure
        self._init_fn = self.__wrapped__ = structure.function
        overload = _compat.lookup_overload(*definition.name)
        # Called by every call and followed by Dynamo, so it is a plain function in the instance.
        self._call: Callable[..., Any] = structure.caller(overload, self.__name__)

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return self._call(*args, **kwargs)  # type: ignore[no-any-return]

    @property
    def source(self) -> str:
        return inspect.getsource(self._call)
