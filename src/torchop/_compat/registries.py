"""What torch.library keeps by name: handles, fake kernels, effects, rules for modes and classes."""

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

# The logger that users of torch.library already configure and test against.
LOGGER_NAME = "torch._library.custom_ops"
# The handle that torch.library's functions consult for a name, and the library behind it, whether
# our `custom_op` or PyTorch's made them.
published_handle: Callable[[str], CustomOpDef | None] = OPDEFS.get
published_library: Callable[[str], torch.library.Library | None] = OPDEF_TO_LIB.get


def published_handles() -> dict[str, CustomOpDef]:
    """Every handle that torch.library's functions could find at the moment."""
    # Without `items`, each key would be looked up again, and a handle may be gone by then.
    return dict(OPDEFS.items())


def publish(qualname: str, handle: CustomOpDef, library: torch.library.Library) -> None:
    """Puts a handle where torch.library's functions, and its own custom_op, look for it."""
    OPDEF_TO_LIB[qualname] = library  # before the handle: `unpublish` goes by it
    OPDEFS[qualname] = handle


def unpublish(qualname: str, library: torch.library.Library) -> None:
    """Takes a handle out again, unless another definition has taken the name since."""
    if OPDEF_TO_LIB.get(qualname) is library:
        OPDEFS.pop(qualname, None)
        del OPDEF_TO_LIB[qualname]


def published_function(qualname: str) -> Callable[..., Any] | None:
    """The function that `custom_op`, ours or PyTorch's, made an operator of."""
    handle = published_handle(qualname)
    return None if handle is None else handle._init_fn


RegistrationHook = Callable[[], object]


class FakeRegistration:
    """A fake kernel that FakeTensor runs from `push` to `remove`, both of which may be repeated."""

    def __init__(self, qualname: str, function: Callable[..., Any], source: str) -> None:
        self._qualname = qualname
        self._kernel = _FakeKernel(function, source)

    def push(self) -> None:
        """Makes it the fake kernel, above those that are there."""
        kernels = self._kernels()
        if self._kernel not in kernels:
            kernels.append(self._kernel)

    def is_used(self) -> bool:
        """Whether it is the one that FakeTensor runs."""
        return self._kernels()[-1:] == [self._kernel]

    def remove(self) -> None:
        """Takes it back."""
        kernels = self._kernels()
        if self._kernel in kernels:
            kernels.remove(self._kernel)

    def _kernels(self) -> list[_FakeKernel]:
        # Looked up each time: the entry of an operator without any is forgotten with it.
        return _rules_registry.find(self._qualname).fake_impl.kernels


def fake_source(qualname: str) -> str | None:
    """Where the fake kernel that FakeTensor would run was registered, if there is one."""
    kernel = _rules_registry.find(qualname).fake_impl.kernel
    return kernel.source if kernel else None


def fake_functions(qualname: str) -> list[Callable[..., Any]]:
    """The fake kernels that were registered for an operator, the one that FakeTensor runs last."""
    entry = _rules_registry._data.get(qualname)  # `find` would make one
    return [] if entry is None else [kernel.func for kernel in entry.fake_impl.kernels]


class Offer(functools.partial[Any]):
    """A rule of torchop's own, which gives way to every other."""


def register_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Registers a rule for a mode or Tensor subclass, if it is not the one there is."""
    withdraw_offers(qualname, cls)
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if rules.find(cls) is not function:
        rules.register(cls, function)


def offer_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Registers a rule for a mode until somebody registers another, unless there is one already."""
    if torch_dispatch_rule(qualname, cls) is None:
        register_torch_dispatch(qualname, cls, Offer(function))


def withdraw_offers(qualname: str, *classes: type) -> None:
    """Takes back what was offered for an operator: for these modes, or for all."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules._data
    for cls in classes or tuple(rules):
        if isinstance(rules.get(cls), Offer):
            del rules[cls]


def withdraw_offer(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Takes back what was offered for a mode, if it is still this function."""
    rule = torch_dispatch_rule(qualname, cls)
    if isinstance(rule, Offer) and rule.func is function:
        withdraw_torch_dispatch(qualname, cls, rule)


def torch_dispatch_rule(qualname: str, cls: type) -> Callable[..., Any] | None:
    """The rule for a mode or Tensor subclass, if there is one."""
    rule: Callable[..., Any] | None = _rules_registry.find(qualname).torch_dispatch_rules.find(cls)
    return rule


def withdraw_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any]) -> None:
    """Takes a rule back, if it is still this one."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if rules.find(cls) is function:
        del rules._data[cls]


def register_effect(qualname: str, effect: EffectType | None) -> RegistrationHook:
    """Tells functionalization of an effect; returns what brings back the one before."""
    holder = _rules_registry.find(qualname).effect
    previous = holder.effect
    holder.register(effect)

    def take_back() -> None:
        if holder.effect is effect:
            holder.register(previous)

    return take_back


def effect_of(qualname: str) -> EffectType | None:
    """The effect of an operator that functionalization knows, whoever declared it."""
    return _rules_registry.find(qualname).effect.effect


def set_default_effect(qualname: str) -> None:
    """Lets PyTorch derive an effect from the schema of an operator, if it holds a ScriptObject.

    PyTorch does that when it is first asked about the operator, maybe before there is a schema.
    """
    entry = _rules_registry._data.get(qualname)
    if entry is not None:
        entry.effect._set_default_effect()
