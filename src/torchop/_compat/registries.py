"""torch.library's registry of fake kernels, and of rules for modes and subclasses of Tensor."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._library.simple_registry import singleton as _rules_registry
from torch._library.utils import Kernel as _FakeKernel

RegistrationHook = Callable[[], None]


def push_fake(qualname: str, function: Callable[..., Any], source: str) -> RegistrationHook:
    """Makes `function` the fake kernel that FakeTensor runs; returns what takes it back."""
    kernels = _rules_registry.find(qualname).fake_impl.kernels
    kernel = _FakeKernel(function, source)
    kernels.append(kernel)

    def remove() -> None:
        if kernel in kernels:
            kernels.remove(kernel)

    return remove


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
) -> RegistrationHook:
    """Registers a rule for a mode or Tensor subclass, and returns what takes it back.

    `instead_of` is a rule that may be there, and gives way.
    """
    withdraw_torch_dispatch(qualname, cls, instead_of)
    _rules_registry.find(qualname).torch_dispatch_rules.register(cls, function)
    return functools.partial(withdraw_torch_dispatch, qualname, cls, function)


def offer_torch_dispatch(
    qualname: str, cls: type, function: Callable[..., Any]
) -> RegistrationHook | None:
    """Registers a rule for a mode and returns what takes it back, unless there is one already."""
    if _rules_registry.find(qualname).torch_dispatch_rules.find(cls) is not None:
        return None
    return register_torch_dispatch(qualname, cls, function)


def withdraw_torch_dispatch(qualname: str, cls: type, function: Callable[..., Any] | None) -> None:
    """Takes a rule back, if it is still this one."""
    rules = _rules_registry.find(qualname).torch_dispatch_rules
    if function is not None and rules.find(cls) is function:
        del rules._data[cls]
