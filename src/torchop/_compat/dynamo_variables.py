"""What a handle is to Dynamo while it traces: something whose calls are calls of the overload."""

from __future__ import annotations

from typing import Any

from torchop._compat import import_hooks

_handle_types: list[type] = []
# Dynamo's table of what it makes of an object, by the very type of that, once Dynamo is imported.
_table: dict[Any, Any] | None = None
_variable: Any = None


def trace_as_overload(handle_type: type) -> None:
    """Lets Dynamo take a call of an object of this very type for one of the overload behind it.

    Without it, Dynamo traces `__call__` and what that calls, which is the same graph and takes half
    as long again. So nothing is lost in a release of PyTorch that keeps its table elsewhere.

    Args:
        handle_type: calling an object of it calls its `overload`, which stays the same while
            `_definition.reason_gone` is None.
    """
    if not _handle_types:
        import_hooks.when_imported("torch._dynamo", _connect)
    _handle_types.append(handle_type)
    if _table is not None:
        _table[handle_type] = _variable


def _connect() -> None:
    global _table, _variable
    try:
        from torch._dynamo.variables.builder import VariableBuilder  # private, so it may move

        table = VariableBuilder._type_dispatch()
        _variable = _handle_variable()
    except (ImportError, AttributeError):
        return
    _table = table
    table.update(dict.fromkeys(_handle_types, _variable))


def _handle_variable() -> Any:
    """Makes what Dynamo's builder calls with itself and a handle that the program mentions."""
    from torch._dynamo.guards import GuardBuilder, install_guard  # imports Dynamo
    from torch._dynamo.source import AttrSource  # imports Dynamo
    from torch._dynamo.variables.base import VariableTracker  # imports Dynamo
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable  # imports Dynamo

    class HandleVariable(UserDefinedObjectVariable):
        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            handle: Any = self.value
            if self.source is None or handle._definition.reason_gone is not None:
                return super().call_function(tx, args, kwargs)  # traces what `__call__` raises
            gone = AttrSource(AttrSource(self.source, "_definition"), "reason_gone")
            install_guard(
                self.source.make_guard(GuardBuilder.ID_MATCH),
                gone.make_guard(GuardBuilder.CONSTANT_MATCH),
            )
            return VariableTracker.build(tx, handle.overload).call_function(tx, args, kwargs)

    def build(builder: Any, handle: Any) -> Any:
        builder.install_guards(GuardBuilder.TYPE_MATCH)
        variable = HandleVariable(handle, source=builder.source)
        return builder.tx.output.side_effects.track_object_existing(handle, variable)

    return build
