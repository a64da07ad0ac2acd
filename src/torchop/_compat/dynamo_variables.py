"""Make Dynamo trace a call to a handle as a call to the OpOverload.

A handle is the object that `torchop.custom_op` returns, an instance of `CustomOp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torchop._compat import compilers, import_hooks

# Some handles take different arguments than their OpOverload, for example objects that contain
# tensors. For these handles, `flatten(handle, args, kwargs, trace)` converts the arguments of a
# call to the arguments of the OpOverload. Through `trace` (a `_Trace`), it can read values in the
# traced program. It returns None if Dynamo must trace the handle's `__call__` instead.
FlattenCall = Callable[[Any, Any, Any, Any], tuple[Any, Any] | None]

_handle_types: dict[type, FlattenCall | None] = {}
# Dynamo's table that maps the exact type of a value to the function that creates a VariableTracker
# for the value. None until Dynamo is imported.
_table: dict[Any, Any] | None = None
_builder: Any = None


def trace_as_overload(handle_type: type, flatten: FlattenCall | None = None) -> None:
    """Make Dynamo trace calls to handles of exactly this type as calls to their overload.

    Otherwise Dynamo traces through the handle's `__call__`, which results in the same graph but
    takes three times as long and installs three times as many guards. This is best effort: if a
    release of PyTorch has changed `VariableBuilder._type_dispatch`, this function is a no-op, and
    only tracing is slower.

    The `overload` of a handle must not change while the operator is registered, and calls to the
    handle must compile to the same code until `_definition.revision` changes.
    """
    if not _handle_types:
        import_hooks.when_imported(compilers.DYNAMO, _connect)
    _handle_types[handle_type] = flatten
    if _table is not None:
        _table[handle_type] = _builder


def forget(handle_type: type) -> None:
    _handle_types.pop(handle_type, None)
    if _table is not None:
        _table.pop(handle_type, None)


def _connect() -> None:
    global _table, _builder
    try:
        from torch._dynamo.variables.builder import VariableBuilder  # private, so it may change

        table = VariableBuilder._type_dispatch()
        _builder = _handle_builder()
    except (ImportError, AttributeError):
        return
    _table = table
    table.update(dict.fromkeys(_handle_types, _builder))


def _handle_builder() -> Any:
    """Return the function that creates Dynamo's variable (a VariableTracker) for a handle."""
    from torch._dynamo.exc import raise_observed_exception  # imports Dynamo
    from torch._dynamo.guards import GuardBuilder, install_guard  # imports Dynamo
    from torch._dynamo.source import AttrSource  # imports Dynamo
    from torch._dynamo.variables.base import VariableTracker  # imports Dynamo
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable  # imports Dynamo

    class HandleVariable(UserDefinedObjectVariable):
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            handle: Any = self.value
            if self.source is None or handle._definition.deregistration_reason is not None:
                return super().call_function(tx, args, kwargs)  # `__call__` raises the error
            flatten = _handle_types[type(handle)]
            if flatten is not None:
                flat = flatten(handle, args, kwargs, _Trace(tx))
                if flat is None:
                    return super().call_function(tx, args, kwargs)
                args, kwargs = flat
            refused = _refusal_of_tensors(handle, args, kwargs)
            if refused is not None:
                raise_observed_exception(TypeError, tx, args=[str(refused)])
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
            # The traced graph is valid only while these attributes keep their current values, so
            # install guards that trigger a recompilation when a value changes.
            for name in ("deregistration_reason", "revision"):
                part = AttrSource(AttrSource(self.source, "_definition"), name)
                install_guard(part.make_guard(GuardBuilder.CONSTANT_MATCH))
            return VariableTracker.build(tx, handle.overload).call_function(tx, args, kwargs)

    def build(builder: Any, handle: Any) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        variable = HandleVariable(handle, source=builder.source)
        return builder.tx.output.side_effects.track_object_existing(handle, variable)

    return build


# Takes the place of each tensor when the arguments of a traced call are checked.
_TENSOR = torch.empty(0)


def _refusal_of_tensors(handle: Any, args: Any, kwargs: Any) -> Exception | None:
    """Return an error if a traced call passes a tensor for an argument that must be a number."""
    from torch._dynamo.variables import TensorVariable  # imports Dynamo

    def stand_in(value: Any) -> Any:
        return _TENSOR if issubclass(type(value.realize()), TensorVariable) else None

    if not handle._definition.schema.numbers:
        return None
    keywords = {name: stand_in(value) for name, value in kwargs.items()}
    refused: Exception | None = handle._refusal_of_tensors(list(map(stand_in, args)), keywords)
    return refused


class _Trace:
    """Give a `FlattenCall` function access to values in the program that Dynamo is tracing."""

    def __init__(self, translator: Any) -> None:
        self._translator = translator

    def type_of(self, value: Any) -> type | None:
        try:
            cls: type = value.realize().python_type()
        except NotImplementedError:
            return None
        return cls

    def attributes(self, value: Any, cls: type, names: Sequence[str]) -> list[Any] | None:
        from torch._dynamo.guards import GuardBuilder, install_guard  # imports Dynamo
        from torch._dynamo.source import AttrSource  # imports Dynamo
        from torch._dynamo.variables.base import VariableTracker  # imports Dynamo

        untouched = self._untouched(value)
        if untouched is None:
            if self.type_of(value) is not cls:
                return None
            return [self._call(getattr, value, name) for name in names]
        instance, source = untouched
        if type(instance) is not cls or not all(hasattr(instance, name) for name in names):
            return None  # Dynamo then traces `__call__`, which raises the error of eager mode
        install_guard(source.make_guard(GuardBuilder.TYPE_MATCH))
        return [
            VariableTracker.build(
                self._translator, getattr(instance, name), AttrSource(source, name)
            )
            for name in names
        ]

    def constant(self, value: Any) -> Any:
        return value.realize().as_python_constant()

    def describe(self, constant: Any) -> Any:
        from torch._dynamo.variables import ConstantVariable  # imports Dynamo

        if type(constant) not in (int, float, bool, str, type(None)):
            raise NotImplementedError
        return ConstantVariable.create(constant)

    def _untouched(self, value: Any) -> tuple[Any, Any] | None:
        """Return the object and source of a value that Dynamo does not track yet, otherwise None.

        The attributes of an untracked object can be read directly. Letting Dynamo track the object
        for mutation first would take as long as tracing an operator, and would import a part of
        DTensor for the first tracked object.
        """
        from torch._dynamo.variables.lazy import LazyVariableTracker  # imports Dynamo

        if type(value) is not LazyVariableTracker or value.is_realized():
            return None
        instance = value.original_value()
        if instance in self._translator.output.side_effects:  # tracked by another variable
            return None
        return instance, value.original_source()

    def _call(self, function: Any, value: Any, *constants: Any) -> Any:
        """Call a builtin function, which Dynamo evaluates instead of tracing into it."""
        from torch._dynamo.variables.base import VariableTracker  # imports Dynamo

        arguments = [value.realize(), *map(self.describe, constants)]
        callee = VariableTracker.build(self._translator, function)
        return callee.call_function(self._translator, arguments, {})
