"""torch.library's registry of fake kernels, and of rules for modes and subclasses of Tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._library.simple_registry import singleton as _rules_registry
from torch._library.utils import Kernel as _FakeKernel

RegistrationHook = Callable[[], None]


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


def register_torch_dispatch(
    qualname: str,
    cls: type,
    function: Callable[..., Any],
    *,
    instead_of: Callable[..., Any] | None = None,
) -> None:
    """Registers a rule for a mode or Tensor subclass; safe to repeat.

    `instead_of` is a rule that may be there, and gives way.
    """
    withdraw_torch_dispatch(qualname, cls, instead_of)
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if rules.find(cls) is not function:
        rules.register(cls, function)


def offer_torch_dispatch(
    qualname: str, cls: type, function: Callable[..., Any]
) -> RegistrationHook | None:
    """Registers a rule for a mode and returns what takes it back, unless there is one already."""
    if torch_dispatch_rule(qualname, cls) is not None:
        return None
    register_torch_dispatch(qualname, cls, function)
    return withdrawal(qualname, cls, function)


def torch_dispatch_rule(qualname: str, cls: type) -> Callable[..., Any] | None:
    """The rule for a mode or Tensor subclass, if there is one."""
    rule: Callable[..., Any] | None = _rules_registry.find(qualname).torch_dispatch_rules.find(cls)
    return rule


def withdrawal(qualname: str, cls: type, function: Callable[..., Any]) -> RegistrationHook:
    """What takes a rule back that is about to be registered.

    It is kept before, so that no interrupt in between leaves a rule that nobody takes back.
    """
    return functools.partial(withdraw_torch_dispatch, qualname, cls, function)


def withdraw_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any] | None) -> None:
    """Takes a rule back, if it is still this one."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if function is not None and rules.find(cls) is function:
        del rules._data[cls]
