"""Apply an operator's torch_dispatch rules to the training form `name__with_residuals`.

The training form is a helper operator that also returns the operator's residuals, which are kernel
outputs that only the backward pass uses.
"""

from __future__ import annotations

import functools
from typing import Any

from torchop._compat import registries
from torchop._compat.classes import TorchDispatchMode
from torchop._core.call import as_tuple
from torchop._errors import ResultError
from torchop._rules.residuals.vmap import Calls


def follow(form: Any, cls: type) -> None:
    """Make the operator's torch_dispatch rule for `cls` apply to `name__with_residuals` too.

    This helper operator also returns residuals, i.e. kernel outputs for the backward pass. A rule
    that the user registered directly for it takes precedence. Compiler modes are skipped, because
    they only record the call in a graph.
    """
    if issubclass(cls, TorchDispatchMode) and cls.is_infra_mode():
        return
    rule = _under_mode if issubclass(cls, TorchDispatchMode) else _on_subclass
    form.helper.registered.add_default_rule(cls, functools.partial(rule, form, cls))


def _under_mode(
    form: Any, cls: type, mode: Any, func: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """Call the torch_dispatch rule, and collect the residuals of the rule's own call to `func`."""
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
    # A torch_dispatch rule typically unwraps its arguments and wraps the results. Residuals (extra
    # kernel outputs for the backward pass) must be wrapped the same way, but only the rule's author
    # knows how, so raise an error.
    raise ResultError(
        f"{form.definition}: the torch_dispatch rule for {cls.__name__} returns no residuals, but "
        f"a call that records a gradient needs {form.declared.spelled}. Register a rule for "
        f"{str(form.helper)!r} that also returns the residuals."
    )
