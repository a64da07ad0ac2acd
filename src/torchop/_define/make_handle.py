"""Makes the handle of a new operator, and its calls native."""

from __future__ import annotations

import inspect
from typing import Any

from torchop._compat import dynamo_variables, torch_ops
from torchop._core.definition import Definition
from torchop._define.handle import CustomOp, P, R
from torchop._native import switch
from torchop._schema.structure import described


def make_handle(definition: Definition) -> CustomOp[..., Any]:
    """Makes the handle, and stores it in the definition."""
    make = CustomOp if definition.structure is None else _structured
    handle: CustomOp[..., Any] = make(definition)
    definition.handle = handle
    switch.make_native(definition)
    return handle


class StructuredOp(CustomOp[P, R]):
    """A handle that is called with objects; `overload` is the flat operator underneath."""

    @property
    def source(self) -> str | None:  # type: ignore[override]  # None for the other operators
        return inspect.getsource(vars(type(self))["__call__"])


def _structured(definition: Definition) -> StructuredOp[..., Any]:
    """Makes a structured handle, of a class of its own: its `__call__` is written for the operator.

    A shared `__call__` would have to pass the arguments on, which takes a fifth of a call.
    """
    structure = definition.structure
    overload = structure.overload = torch_ops.lookup_overload(*definition.name)
    function = getattr(structure.function, "__name__", definition.name.name)
    call = structure.caller(overload, function, is_method=True)
    members = {"__call__": call, "__module__": CustomOp.__module__, "__slots__": ()}
    cls = type(StructuredOp.__name__, (StructuredOp,), members)
    handle: StructuredOp[..., Any] = cls(definition)
    dynamo_variables.trace_as_overload(cls, _take_apart)
    structure.at_end = lambda: dynamo_variables.forget(cls)  # its table would keep the class alive
    return handle


def _take_apart(handle: StructuredOp[..., Any], args: Any, kwargs: Any, compiler: Any) -> Any:
    return described.flat_call(handle._definition.structure, args, kwargs, compiler)
