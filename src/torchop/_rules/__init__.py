"""The compiled rules and the installers.

An operator has one object of each compiled rule. An installer is a function that prepares a new
operator for a subsystem without user registrations. Public rules (`torchop.Rule`) are in `user`.
"""

from __future__ import annotations

from typing import Any

from torchop._core import definition
from torchop._core.definition import CompiledRule, Installer
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.checkpoint_modes import RecomputationRule
from torchop._rules.effect import EffectRule
from torchop._rules.fake.rule import FakeRule
from torchop._rules.functionalization import trace as functionalization
from torchop._rules.inlining import InliningRule
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.mutation import kernels as mutation
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.vmap.rule import VmapRule

RULES: tuple[type[CompiledRule[Any]], ...] = (
    KernelRule,
    FakeRule,
    AutogradRule,
    VmapRule,
    AutocastRule,
    TorchDispatchRule,
    EffectRule,
    InliningRule,
    RecomputationRule,
)
INSTALLERS: tuple[Installer, ...] = (mutation.install, functionalization.install)
definition.kinds = RULES
definition.installers = INSTALLERS
