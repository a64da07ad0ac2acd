"""Apply an operator's torch_dispatch rules to the training form `name__with_residuals`."""

from __future__ import annotations

import functools
from typing import Any

from torchop._compat import registries
from torchop._compat.classes import TorchDispatchMode
from torchop._core.call import as_tuple
from torchop._errors import ResultError
from torchop._rules.residuals.vmap import Calls


def follow(form: Any, cls: type) -> None:
    """Register a torch_dispatch rule for the training form that calls the operator's rule.

    A rule that the user registers for the training form takes precedence. The modes of compilers
    need no rule, because they record a call to the training form.
    """
    if issubclass(cls, TorchDispatchMode) and cls.is_infra_mode():
        return
    rule = _under_mode if issubclass(cls, TorchDispatchMode) else _on_subclass
    registries.register_default_torch_dispatch(
        str(form.helper), cls, functools.partial(rule, form, cls)
    )


def _under_mode(
    form: Any, cls: type, mode: Any, func: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """Call the operator's rule, and collect the residuals of the call to `func` in the rule."""
    kwargs = kwargs or {}
    definition = form.definition
    rule: Any = registries.torch_dispatch_rule(str(definition), cls)
    calls = Calls(form)
    with calls:
        output = rule(mode, definition.overload, types, args, kwargs)
    if output is NotImplemented:
        return output
    if len(calls.saved) != 1:
        raise ResultError(
            f"{definition}: the torch_dispatch rule for {cls.__name__} called func "
            f"{len(calls.saved)} times, but the residuals must come from exactly one call. Call "
            "func once if a gradient is recorded, or register a rule for "
            f"{str(form.helper)!r} that also returns the residuals."
        )
    return (*as_tuple(definition.schema, output), *calls.saved[0])


def _on_subclass(form: Any, cls: type, *_: Any) -> Any:
    # The rule may unwrap arguments and wrap results, but only the rule's author knows how to wrap
    # residuals.
    raise ResultError(
        f"{form.definition}: the torch_dispatch rule for {cls.__name__} returns no residuals, but "
        f"a call that records a gradient needs {form.declared.spelled}. Register a rule for "
        f"{str(form.helper)!r} that also returns the residuals."
    )
