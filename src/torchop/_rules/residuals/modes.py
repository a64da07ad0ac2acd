"""Rules of an operator for modes and subclasses, applied to its training form."""

from __future__ import annotations

import functools
from typing import Any

from torchop._compat import registries
from torchop._compat.classes import TorchDispatchMode
from torchop._errors import ResultError
from torchop._rules.residuals.handover import as_tuple
from torchop._rules.residuals.vmap import Calls


def follow(form: Any, cls: type) -> None:
    """Apply the operator's rule for `cls` to calls of the training form.

    A rule that is registered for the training form takes precedence. Modes of compilers must see
    the training form itself. Under FakeTensor, its fake kernel calls the operator, and so the rule.
    """
    if issubclass(cls, TorchDispatchMode) and cls.is_infra_mode():
        return
    rule = _under_mode if issubclass(cls, TorchDispatchMode) else _on_subclass
    registries.offer_torch_dispatch(str(form.companion), cls, functools.partial(rule, form, cls))


def _under_mode(
    form: Any, cls: type, mode: Any, func: Any, types: Any, args: Any, kwargs: Any
) -> Any:
    """Run the operator's rule, and take the residuals from the call that the rule makes."""
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
            f"{len(calls.saved)} times, so it is not known which residuals a call that records a "
            "gradient has. Call func there once, or register a rule for "
            f"{str(form.companion)!r}, which also returns the residuals."
        )
    return (*as_tuple(definition.schema, output), *calls.saved[0])


def _on_subclass(form: Any, cls: type, *_: Any) -> Any:
    # A rule may call the kernel for each inner tensor and wrap the results. Only its author can do
    # the same with residuals.
    raise ResultError(
        f"{form.definition}: its torch_dispatch rule for {cls.__name__} returns no residuals, but "
        f"a call that records a gradient needs {form.declared.spelled}. Register a rule for "
        f"{str(form.companion)!r}, which also returns the residuals."
    )
