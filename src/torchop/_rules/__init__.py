"""The rules of an operator: one class for each subsystem of PyTorch, such as autograd or vmap.

Every operator has one instance of each class in `RULES`, which stores the functions registered for
this operator, such as kernels or a backward formula. When an operator is defined, the functions in
`INSTALLERS` install its initial kernels and torch_dispatch rules.

The package `user` contains a different kind of rule: torchop's own instances of the public class
`torchop.Rule`.
"""

from __future__ import annotations

from typing import Any

from torchop._core import definition
from torchop._core.definition import CompiledRule, Installer
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.autograd.rule import install as install_autograd
from torchop._rules.checkpoint_modes import install as install_recomputation
from torchop._rules.effect import EffectRule
from torchop._rules.effect import install as install_effect
from torchop._rules.fake.rule import FakeRule
from torchop._rules.fake.rule import install as install_fake
from torchop._rules.functionalization.rule import install as install_functionalization
from torchop._rules.inlining import InliningRule
from torchop._rules.inlining import install as install_inlining
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.kernels.rule import install as install_kernels
from torchop._rules.layout import LayoutRule
from torchop._rules.layout import install as install_layouts
from torchop._rules.mutation.kernels import install as install_mutation
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
    LayoutRule,
)
INSTALLERS: tuple[Installer, ...] = (
    install_kernels,
    install_fake,
    install_layouts,
    install_autograd,
    install_mutation,
    install_inlining,
    install_effect,
    install_functionalization,
    install_recomputation,
)
definition.kinds = RULES
definition.installers = INSTALLERS
