"""Access torch.library's registries of handles, fake kernels, effects and torch_dispatch rules.

A handle is the object that `custom_op` returns. An effect makes functionalization preserve an
operator's calls and their order. A torch_dispatch rule handles an operator's calls under a mode or
for a Tensor subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.library
from torch._library.custom_ops import OPDEF_TO_LIB, OPDEFS
from torch._library.simple_registry import singleton as _rules_registry
from torch._library.utils import Kernel as _FakeKernel

from torchop._compat import inductor_effects, stock_kernels
from torchop._compat.classes import CustomOpDef, EffectType

# Use torch.library's logger, because users have already configured it.
LOGGER_NAME = "torch._library.custom_ops"
# `published_handle(qualname)` and `published_library(qualname)` return the handle and the library
# of an operator that is registered in torch.library, or None.
published_handle: Callable[[str], CustomOpDef | None] = OPDEFS.get
published_library: Callable[[str], torch.library.Library | None] = OPDEF_TO_LIB.get


def published_handles() -> list[CustomOpDef]:
    # Copy the references first, because another thread may add a handle during the loop, and Python
    # would raise RuntimeError. Unlike `OPDEFS.values()`, `valuerefs` copies them in one step.
    handles = (reference() for reference in OPDEFS.valuerefs())
    return [handle for handle in handles if handle is not None]


def publish(qualname: str, handle: CustomOpDef, library: torch.library.Library) -> None:
    """Register a handle in torch.library, whose functions then find it by the operator's name."""
    OPDEF_TO_LIB[qualname] = library  # first, because `unpublish` checks it
    OPDEFS[qualname] = handle


def unpublish(qualname: str, library: torch.library.Library) -> None:
    """Undo `publish`, unless a later definition has already published another handle."""
    if OPDEF_TO_LIB.get(qualname) is library:
        OPDEFS.pop(qualname, None)
        del OPDEF_TO_LIB[qualname]


def published_function(qualname: str) -> Callable[..., Any] | None:
    handle = published_handle(qualname)
    return None if handle is None else handle._init_fn


RegistrationHook = Callable[[], object]


def register_fake(
    qualname: str, function: Callable[..., Any], source: str
) -> tuple[object, RegistrationHook]:
    """Register a fake kernel. Return PyTorch's object for it, and a function to remove it."""
    kernel = _FakeKernel(function, source)
    _fake_kernels(qualname).append(kernel)

    def remove() -> None:
        kernels = _fake_kernels(qualname)
        if kernel in kernels:
            kernels.remove(kernel)

    return kernel, remove


def is_active_fake(qualname: str, kernel: object) -> bool:
    """Return whether `kernel` is the operator's active fake kernel, the one registered last."""
    return _fake_kernels(qualname)[-1:] == [kernel]


def _fake_kernels(qualname: str) -> list[_FakeKernel]:
    # Look up the list on each call instead of storing it, because it may go stale: PyTorch drops an
    # operator's registry entry when the operator's last fake kernel or other rule is removed.
    return _rules_registry.find(qualname).fake_impl.kernels


def fake_source(qualname: str) -> str | None:
    kernel = _rules_registry.find(qualname).fake_impl.kernel
    return kernel.source if kernel else None


def formula_functions(qualname: str) -> list[Callable[..., Any]]:
    """Return the backward function of an operator, from `register_autograd`, if any."""
    function = getattr(published_handle(qualname), "_backward_fn", None)
    if function is None:
        function = stock_kernels.backward_function(qualname)
    return [] if function is None else [function]


def fake_functions(qualname: str) -> list[Callable[..., Any]]:
    """Return an operator's fake kernels, the active one last."""
    entry = _rules_registry._data.get(qualname)  # `find` would create an entry
    return [] if entry is None else [kernel.func for kernel in entry.fake_impl.kernels]


class DefaultRule(functools.partial[Any]):
    """A torch_dispatch rule that torchop registers by default. Any other rule replaces it."""

    __slots__ = ("function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function  # `func` may differ, because `partial` unwraps another `partial`

    def __bool__(self) -> bool:
        """Return False, so that `register_torch_dispatch` lets another function replace this one.

        PyTorch's `torch.library.register_torch_dispatch` rejects a registration if the existing
        torch_dispatch rule is true. A rule that is false still works, because PyTorch compares it
        with None before calling it.
        """
        return False


def register_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Register a function that handles an operator's calls under a mode or for a Tensor subclass.

    The function takes precedence over a default rule until it is withdrawn. Registering the same
    function again is a no-op.
    """
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    before = rules.find(cls)
    if isinstance(before, DefaultRule):
        del rules._data[cls]
    if before is not function:
        rules.register(cls, function)


def withdraw_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Undo `register_torch_dispatch`, unless another function has replaced the registered one."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if rules.find(cls) is function:
        del rules._data[cls]
        _apply_default(qualname, cls)


# The default torch_dispatch rules of each operator for each mode or Tensor subclass, in
# registration order. PyTorch's registry contains the first of them, unless the user registered a
# rule.
_defaults: dict[tuple[str, type], list[DefaultRule]] = {}


def add_default_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Register a default rule, which applies unless there is another rule for the same class."""
    _defaults.setdefault((qualname, cls), []).append(DefaultRule(function))
    _apply_default(qualname, cls)


def remove_default_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Undo one call of `add_default_torch_dispatch`."""
    rules = _defaults.get((qualname, cls), [])
    rule = next((each for each in rules if each.function == function), None)
    if rule is not None:
        rules.remove(rule)
        _apply_default(qualname, cls)


def _apply_default(qualname: str, cls: type) -> None:
    rules = _rules_registry.find(qualname).torch_dispatch_rules._data
    if isinstance(rules.get(cls), DefaultRule):
        del rules[cls]
    if defaults := _defaults.get((qualname, cls)):
        rules.setdefault(cls, defaults[0])
    else:
        _defaults.pop((qualname, cls), None)


def torch_dispatch_rule(qualname: str, cls: type) -> Callable[..., Any] | None:
    rule: Callable[..., Any] | None = _rules_registry.find(qualname).torch_dispatch_rules.find(cls)
    return rule


def register_effect(qualname: str, effect: EffectType | None) -> RegistrationHook:
    """Register an operator's effect for functionalization, and return a function to undo this.

    An effect makes compilers preserve the operator's calls. Several libraries may register an
    effect for the same operator. Once a registration is undone, the latest of the remaining effects
    applies or, if none is left, the effect from before the first registration.
    """
    holder = _rules_registry.find(qualname).effect
    effects, key = _effects.setdefault(qualname, {None: holder.effect}), object()
    effects[key] = effect
    holder.register(effect)
    if effect is not None:
        inductor_effects.keep_order()

    def undo() -> None:
        del effects[key]
        if holder.effect is effect:
            holder.register(next(reversed(effects.values())))
        if len(effects) == 1:
            del _effects[qualname]

    return undo


# Each operator's declared side effects in the order of their registration, where each registration
# has its own key. The key None stands for the effect from before the first registration.
_effects: dict[str, dict[object, EffectType | None]] = {}


def effect_of(qualname: str) -> EffectType | None:
    return _rules_registry.find(qualname).effect.effect


def set_default_effect(qualname: str) -> None:
    """Run PyTorch's detection of an operator's default effect again.

    PyTorch gives an effect to each operator with ScriptObject arguments, but only when it creates
    the operator's registry entry (`EffectHolder.__init__` in torch/_library/effects.py). If the
    entry was created before the operator's schema was defined, PyTorch could not see the arguments,
    so the operator has no effect yet.
    """
    entry = _rules_registry._data.get(qualname)
    if entry is not None:
        entry.effect._set_default_effect()
        inductor_effects.keep_order()
