"""torch.library's registries of handles, fake kernels, effects and torch_dispatch rules.

A handle is the object that `custom_op` returns. An effect makes functionalization preserve an
operator's calls and their order. A torch_dispatch rule handles an operator's calls in a mode or for
a Tensor subclass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.library
from torch._library.custom_ops import OPDEF_TO_LIB, OPDEFS
from torch._library.simple_registry import singleton as _rules_registry
from torch._library.utils import Kernel as _FakeKernel

from torchop._compat import inductor_effects
from torchop._compat.classes import CustomOpDef, EffectType

# torchop uses torch.library's logger, because users already configure it.
LOGGER_NAME = "torch._library.custom_ops"
# `published_handle(qualname)` returns the handle that was registered in torch.library for an
# operator, and `published_library(qualname)` returns the operator's library, or None.
published_handle: Callable[[str], CustomOpDef | None] = OPDEFS.get
published_library: Callable[[str], torch.library.Library | None] = OPDEF_TO_LIB.get


def published_handles() -> dict[str, CustomOpDef]:
    # Do not use `dict(OPDEFS)`, because it would look up each key again. By then, the handle may
    # have been garbage-collected, because OPDEFS references handles weakly.
    return dict(OPDEFS.items())


def publish(qualname: str, handle: CustomOpDef, library: torch.library.Library) -> None:
    """Register a handle in torch.library, whose functions then find it by the operator's name."""
    OPDEF_TO_LIB[qualname] = library  # first, because `unpublish` checks it
    OPDEFS[qualname] = handle


def unpublish(qualname: str, library: torch.library.Library) -> None:
    """Undo `publish`, unless a later definition has published another handle."""
    if OPDEF_TO_LIB.get(qualname) is library:
        OPDEFS.pop(qualname, None)
        del OPDEF_TO_LIB[qualname]


def published_function(qualname: str) -> Callable[..., Any] | None:
    handle = published_handle(qualname)
    return None if handle is None else handle._init_fn


RegistrationHook = Callable[[], object]


class FakeRegistration:
    """A fake kernel that is registered after `push` and until `remove`.

    Calling either method twice has no further effect.
    """

    def __init__(self, qualname: str, function: Callable[..., Any], source: str) -> None:
        self._qualname = qualname
        self._kernel = _FakeKernel(function, source)

    def push(self) -> None:
        kernels = self._kernels()
        if self._kernel not in kernels:
            kernels.append(self._kernel)

    def is_used(self) -> bool:
        """Return whether this is the operator's active fake kernel, i.e. the one pushed last."""
        return self._kernels()[-1:] == [self._kernel]

    def remove(self) -> None:
        kernels = self._kernels()
        if self._kernel in kernels:
            kernels.remove(self._kernel)

    def _kernels(self) -> list[_FakeKernel]:
        # Look up the list on each call instead of storing it. PyTorch's registry drops an
        # operator's entry when the operator's last rule is removed, so a stored list could be out
        # of date.
        return _rules_registry.find(self._qualname).fake_impl.kernels


def fake_source(qualname: str) -> str | None:
    kernel = _rules_registry.find(qualname).fake_impl.kernel
    return kernel.source if kernel else None


def formula_functions(qualname: str) -> list[Callable[..., Any]]:
    """Return the backward function of an operator that `torch.library.custom_op` defined, if any.

    PyTorch stores the formulas of other operators only inside of kernels.
    """
    function = getattr(published_handle(qualname), "_backward_fn", None)
    return [] if function is None else [function]


def fake_functions(qualname: str) -> list[Callable[..., Any]]:
    """Return an operator's fake kernels, the active one last."""
    entry = _rules_registry._data.get(qualname)  # `find` would create an entry
    return [] if entry is None else [kernel.func for kernel in entry.fake_impl.kernels]


class DefaultRule(functools.partial[Any]):
    """A rule that torchop registers by default. Any other registration replaces it."""

    def __bool__(self) -> bool:
        """Return False, because `torch.library.register_torch_dispatch` rejects another true rule.

        PyTorch only compares rules that it calls with None.
        """
        return False


def register_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Register a function that handles an operator's calls in a mode or for a Tensor subclass.

    The function replaces a default rule until it is withdrawn. If the same function is registered
    already, nothing changes.
    """
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    before = rules.find(cls)
    if isinstance(before, DefaultRule):
        _replaced[qualname, cls] = before
        del rules._data[cls]
    if before is not function:
        rules.register(cls, function)


# The default rules that a user's rule replaces, by the operator's name and the mode.
_replaced: dict[tuple[str, type], DefaultRule] = {}


def register_default_torch_dispatch(
    qualname: str, cls: type, function: Callable[..., Any]
) -> RegistrationHook:
    """Register a default rule for a mode, unless the operator has a rule for this mode.

    Return a function that removes only the rule that this call has registered.
    """
    rule = DefaultRule(function)
    if torch_dispatch_rule(qualname, cls) is None:
        _rules_registry.find(qualname).torch_dispatch_rules.register(cls, rule)

    def undo() -> None:
        rules = _rules_registry.find(qualname).torch_dispatch_rules._data
        if rules.get(cls) is rule:
            del rules[cls]
        if _replaced.get((qualname, cls)) is rule:
            del _replaced[qualname, cls]

    return undo


def remove_default_rules(qualname: str) -> None:
    rules = _rules_registry.find(qualname).torch_dispatch_rules._data
    for cls in [cls for cls, rule in rules.items() if isinstance(rule, DefaultRule)]:
        del rules[cls]
    for key in [key for key in _replaced if key[0] == qualname]:
        del _replaced[key]


def torch_dispatch_rule(qualname: str, cls: type) -> Callable[..., Any] | None:
    rule: Callable[..., Any] | None = _rules_registry.find(qualname).torch_dispatch_rules.find(cls)
    return rule


def withdraw_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Remove the rule that calls `function`, unless another rule has replaced it.

    If the rule has replaced a default rule, the default rule applies again.
    """
    rules, key = _rules_registry.find(qualname).torch_dispatch_rules, (qualname, cls)
    rule, replaced = rules.find(cls), _replaced.get(key)
    if rule is function or (isinstance(rule, DefaultRule) and rule.func is function):
        del rules._data[cls]
        if replaced is not None:
            rules.register(cls, _replaced.pop(key))
    elif replaced is not None and replaced.func is function:
        del _replaced[key]


def register_effect(qualname: str, effect: EffectType | None) -> RegistrationHook:
    """Register an operator's effect for functionalization, and return a function to undo this.

    Several libraries may register an effect for the same operator. After `undo`, the latest of the
    remaining effects applies, or the effect from before the first registration.
    """
    holder = _rules_registry.find(qualname).effect
    rows = _effects.setdefault(qualname, [_Effect(holder.effect)])
    row = _Effect(effect)
    rows.append(row)
    holder.register(effect)
    if effect is not None:
        inductor_effects.keep_order()

    def undo() -> None:
        if not any(each is row for each in rows):
            return
        rows[:] = [each for each in rows if each is not row]
        if holder.effect is effect:
            holder.register(rows[-1].effect)
        if len(rows) == 1 and _effects.get(qualname) is rows:
            del _effects[qualname]

    return undo


class _Effect(NamedTuple):
    effect: EffectType | None


# Each operator's effects in the order of their registration. The first item is the effect from
# before the first registration.
_effects: dict[str, list[_Effect]] = {}


def effect_of(qualname: str) -> EffectType | None:
    return _rules_registry.find(qualname).effect.effect


def set_default_effect(qualname: str) -> None:
    """Run PyTorch's detection of an operator's default effect again.

    PyTorch gives an effect to each operator with ScriptObject arguments, but only when it creates
    the operator's registry entry (`EffectHolder.__init__` in torch/_library/effects.py). If the
    entry was created before the operator's schema, PyTorch could not see the arguments, so it gave
    no effect.
    """
    entry = _rules_registry._data.get(qualname)
    if entry is not None:
        entry.effect._set_default_effect()
        inductor_effects.keep_order()
