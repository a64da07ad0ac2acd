"""The handle of an operator whose arguments or results have a structure."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torchop._compat import torch_ops
from torchop._definition import Definition
from torchop._errors import OperatorGoneError
from torchop._operator import CustomOp, P, R
from torchop._structure import rules

if TYPE_CHECKING:
    from torchop._structure.structure import Structure


class StructuredDefinition(Definition):
    """A definition that knows the structure behind its flat schema."""

    __slots__ = ("structure",)
    structure: Structure

    def __init__(self, structure: Structure, /, *args: Any, **kwargs: Any) -> None:
        self.structure = structure
        super().__init__(*args, **kwargs)

    def outdate_plan(self) -> None:
        super().outdate_plan()
        if self.gone is not None:
            self.structure.retire(self._refuse)

    flat_kernel = rules.flat_kernel
    flat_fake = rules.flat_fake
    flat_vmap = rules.flat_vmap
    flat_torch_dispatch = rules.flat_torch_dispatch
    flat_formula = rules.flat_formula
    flat_jvp = rules.flat_jvp

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise OperatorGoneError(self.gone)


class StructuredOp(CustomOp[P, R]):
    """A handle that is called with objects; `overload` is the flat operator underneath."""

    def __init__(self, definition: StructuredDefinition) -> None:
        super().__init__(definition)
        self._init_fn = self.__wrapped__ = definition.structure.function

    @property
    def source(self) -> str | None:
        return inspect.getsource(vars(type(self))["__call__"])


def make_handle(definition: StructuredDefinition) -> StructuredOp[..., Any]:
    """Makes the handle, of a class of its own: what its calls run is written for this operator.

    A `__call__` for all of them would pass the arguments on, which takes a fifth of a call.
    """
    structure = definition.structure
    overload = structure.overload = torch_ops.lookup_overload(*definition.name)
    function = getattr(structure.function, "__name__", definition.name.name)
    call = structure.caller(overload, function, is_method=True)
    members = {"__call__": call, "__module__": CustomOp.__module__, "__slots__": ()}
    cls = type(StructuredOp.__name__, (StructuredOp,), members)
    handle: StructuredOp[..., Any] = cls(definition)
    return handle
