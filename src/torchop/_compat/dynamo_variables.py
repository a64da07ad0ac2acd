"""How Dynamo traces a handle: its calls are calls of the overload."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchop._compat import compilers, import_hooks

# `take_apart(handle, args, kwargs, compiler)`: the arguments of the overload behind a handle; None
# where Dynamo has to trace `__call__`.
TakeApart = Callable[[Any, Any, Any, Any], tuple[Any, Any] | None]

_handle_types: dict[type, TakeApart | None] = {}
# Dynamo's table of builders by the exact type of an object, once Dynamo is imported.
_table: dict[Any, Any] | None = None
_builder: Any = None


def trace_as_overload(handle_type: type, take_apart: TakeApart | None = None) -> None:
    """Lets Dynamo take a call of an object of this very type for one of the overload behind it.

    Without it, Dynamo traces `__call__` and what that calls, which is the same graph and takes half
    as long again. So nothing is lost in a release of PyTorch that keeps its table elsewhere.

    Args:
        handle_type: calling an object of it calls its `overload`, which stays the same while
            `_definition.reason_gone` is None, and means the same to compilers while
            `_definition.revision` is the same number.
        take_apart: makes the arguments of the overload; by default they are those of the call.
    """
    if not _handle_types:
        import_hooks.when_imported(compilers.DYNAMO, _connect)
    _handle_types[handle_type] = take_apart
    if _table is not None:
        _table[handle_type] = _builder


def forget(handle_type: type) -> None:
    """Undoes `trace_as_overload`."""
    _handle_types.pop(handle_type, None)
    if _table is not None:
        _table.pop(handle_type, None)


def _connect() -> None:
    global _table, _builder
    try:
        from torch._dynamo.variables.builder import VariableBuilder  # private, so it may move

        table = VariableBuilder._type_dispatch()
        _builder = _handle_builder()
    except (ImportError, AttributeError):
        return
    _table = table
    table.update(dict.fromkeys(_handle_types, _builder))


def _handle_builder() -> Any:
    """Makes the function that Dynamo's builder calls with itself and a handle of the program."""
    from torch._dynamo.guards import GuardBuilder, install_guard  # imports Dynamo
    from torch._dynamo.source import AttrSource  # imports Dynamo
    from torch._dynamo.variables.base import VariableTracker  # imports Dynamo
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable  # imports Dynamo

    class HandleVariable(UserDefinedObjectVariable):
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            handle: Any = self.value
            if self.source is None or handle._definition.reason_gone is not None:
                return super().call_function(tx, args, kwargs)  # traces what `__call__` raises
            take_apart = _handle_types[type(handle)]
            if take_apart is not None:
                flat = take_apart(handle, args, kwargs, _Trace(tx))
                if flat is None:
                    return super().call_function(tx, args, kwargs)
                args, kwargs = flat
            install_guard(self.source.make_guard(GuardBuilder.ID_MATCH))
            for name in ("reason_gone", "revision"):  # as long as nothing that was baked changes
                part = AttrSource(AttrSource(self.source, "_definition"), name)
                install_guard(part.make_guard(GuardBuilder.CONSTANT_MATCH))
            return VariableTracker.build(tx, handle.overload).call_function(tx, args, kwargs)

    def build(builder: Any, handle: Any) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        variable = HandleVariable(handle, source=builder.source)
        return builder.tx.output.side_effects.track_object_existing(handle, variable)

    return build


class _Trace:
    """What Dynamo knows of the values in the program that it traces."""

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
            return None  # where an attribute is missing, a trace raises what eager mode raises
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
        """An object that this trace has not looked at, and its source; None for all others.

        Dynamo follows every object that it looks at, because the program may change it. That takes
        as long as an operator, and for the first object of a process it imports a part of DTensor.
        """
        from torch._dynamo.variables.lazy import LazyVariableTracker  # imports Dynamo

        if type(value) is not LazyVariableTracker or value.is_realized():
            return None
        instance = value.original_value()
        if instance in self._translator.output.side_effects:  # the program has it under two names
            return None
        return instance, value.original_source()

    def _call(self, function: Any, value: Any, *constants: Any) -> Any:
        """The result of a builtin function, which Dynamo can describe without a trace."""
        from torch._dynamo.variables.base import VariableTracker  # imports Dynamo

        arguments = [value.realize(), *map(self.describe, constants)]
        callee = VariableTracker.build(self._translator, function)
        return callee.call_function(self._translator, arguments, {})
