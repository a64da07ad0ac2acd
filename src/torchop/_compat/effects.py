"""Side effects, in the registry that functionalization asks."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch._library.simple_registry import singleton as _rules_registry
from torch.fx.experimental import proxy_tensor

from torchop._compat import registries
from torchop._compat.classes import EffectType


def register(qualname: str, effect: EffectType | None) -> registries.RegistrationHook:
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
    """Lets PyTorch find the effect that a schema has by itself, if it holds a ScriptObject.

    PyTorch does that for the first question after an operator, which may come before its schema.
    """
    entry = _rules_registry._data.get(qualname)
    if entry is not None:
        entry.effect._set_default_effect()


def effect_is_threaded(mode: Any, effect: EffectType) -> bool:
    """Whether the graph that is being traced orders calls that have an effect, and so keeps them.

    PyTorch hands a token from one such call to the next, and `mode`, the FunctionalTensorMode, has
    the last. Most graphs inside a graph (the branches of a `torch.cond`, the body of a loop)
    neither take nor return it, so a call there is dead code.
    """
    proxy_mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    if proxy_mode is None:
        return True  # nothing is traced yet
    token = mode._tokens.get(effect)
    if token is None:
        # A backward makes its first token itself.
        tracer = proxy_tensor._CURRENT_MAKE_FX_TRACER
        return tracer is None or not tracer.is_hop_subgraph_tracer()
    if hasattr(token, "elem"):
        token = torch._from_functional_tensor(token.elem)
    return proxy_tensor.has_proxy_slot(token, cast(Any, proxy_mode).tracer)
