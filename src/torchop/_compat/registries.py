"""torch.library's registries: handles, fake kernels, effects and torch_dispatch rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.library
from torch._library.custom_ops import OPDEF_TO_LIB, OPDEFS
from torch._library.simple_registry import singleton as _rules_registry
from torch._library.utils import Kernel as _FakeKernel

from torchop._compat.classes import CustomOpDef, EffectType

# The logger of torch.library, which users already configure.
LOGGER_NAME = "torch._library.custom_ops"
# Return the published handle, and the library, of an operator.
published_handle: Callable[[str], CustomOpDef | None] = OPDEFS.get
published_library: Callable[[str], torch.library.Library | None] = OPDEF_TO_LIB.get


def published_handles() -> dict[str, CustomOpDef]:
    # Do not use `dict(OPDEFS)`: it would look up each key again, but the weakly referenced handle
    # may be dead by then.
    return dict(OPDEFS.items())


def publish(qualname: str, handle: CustomOpDef, library: torch.library.Library) -> None:
    """Publish a handle, so that the functions of torch.library find it by name."""
    OPDEF_TO_LIB[qualname] = library  # first, because `unpublish` checks it
    OPDEFS[qualname] = handle


def unpublish(qualname: str, library: torch.library.Library) -> None:
    """Remove an operator's published handle, unless a later definition has published another."""
    if OPDEF_TO_LIB.get(qualname) is library:
        OPDEFS.pop(qualname, None)
        del OPDEF_TO_LIB[qualname]


def published_function(qualname: str) -> Callable[..., Any] | None:
    """Return the function from which `custom_op` created an operator, or None."""
    handle = published_handle(qualname)
    return None if handle is None else handle._init_fn


RegistrationHook = Callable[[], object]


class FakeRegistration:
    """A fake kernel that is registered from `push` to `remove`. Both may be called twice."""

    def __init__(self, qualname: str, function: Callable[..., Any], source: str) -> None:
        self._qualname = qualname
        self._kernel = _FakeKernel(function, source)

    def push(self) -> None:
        kernels = self._kernels()
        if self._kernel not in kernels:
            kernels.append(self._kernel)

    def is_used(self) -> bool:
        """Return whether this is the operator's active fake kernel."""
        return self._kernels()[-1:] == [self._kernel]

    def remove(self) -> None:
        kernels = self._kernels()
        if self._kernel in kernels:
            kernels.remove(self._kernel)

    def _kernels(self) -> list[_FakeKernel]:
        # Look this up on each call: removing an operator's last rule drops the registry entry.
        return _rules_registry.find(self._qualname).fake_impl.kernels


def fake_source(qualname: str) -> str | None:
    """Return the file and line where an operator's active fake kernel was registered, or None."""
    kernel = _rules_registry.find(qualname).fake_impl.kernel
    return kernel.source if kernel else None


def fake_functions(qualname: str) -> list[Callable[..., Any]]:
    """Return an operator's fake kernels, the active one last."""
    entry = _rules_registry._data.get(qualname)  # `find` would create an entry
    return [] if entry is None else [kernel.func for kernel in entry.fake_impl.kernels]


class DefaultRule(functools.partial[Any]):
    """A rule that torchop registers by default, and that any other registration replaces."""


def register_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Register a rule for a mode or Tensor subclass, replacing a default rule.

    Does nothing if this function is registered already.
    """
    remove_default_rules(qualname, cls)
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if rules.find(cls) is not function:
        rules.register(cls, function)


def register_default_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Register a default rule for a mode, unless the operator has a rule for this mode."""
    if torch_dispatch_rule(qualname, cls) is None:
        register_torch_dispatch(qualname, cls, DefaultRule(function))


def remove_default_rules(qualname: str, *classes: type) -> None:
    """Remove an operator's default rules for `classes`, or for all classes if none is given."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules._data
    for cls in classes or tuple(rules):
        if isinstance(rules.get(cls), DefaultRule):
            del rules[cls]


def torch_dispatch_rule(qualname: str, cls: type) -> Callable[..., Any] | None:
    """Return an operator's rule for a mode or Tensor subclass, or None."""
    rule: Callable[..., Any] | None = _rules_registry.find(qualname).torch_dispatch_rules.find(cls)
    return rule


def withdraw_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Remove a rule, default or not, unless another rule has replaced it."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    rule = rules.find(cls)
    if rule is function or (isinstance(rule, DefaultRule) and rule.func is function):
        del rules._data[cls]


def register_effect(qualname: str, effect: EffectType | None) -> RegistrationHook:
    """Register an operator's effect for functionalization, and return a function to undo this."""
    holder = _rules_registry.find(qualname).effect
    previous = holder.effect
    holder.register(effect)

    def undo() -> None:
        if holder.effect is effect:
            holder.register(previous)

    return undo


def effect_of(qualname: str) -> EffectType | None:
    """Return the effect that functionalization uses for an operator, or None."""
    return _rules_registry.find(qualname).effect.effect


def set_default_effect(qualname: str) -> None:
    """Let PyTorch derive an operator's effect from ScriptObject arguments in the schema.

    `EffectHolder.__init__` (torch/_library/effects.py) does so when the registry entry is created,
    which may be before the schema exists.
    """
    entry = _rules_registry._data.get(qualname)
    if entry is not None:
        entry.effect._set_default_effect()
