"""The compiled rules, one of each for every operator: a file or a folder, and a line here.

The rules of the public kind, `torchop.Rule`, have their table in `user`.
"""

from __future__ import annotations

from typing import Any

from torchop._core import definition
from torchop._core.definition import CompiledRule
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd.rule import AutogradRule
from torchop._rules.checkpoint_modes import RecomputationRule
from torchop._rules.effect import EffectRule
from torchop._rules.fake.rule import FakeRule
from torchop._rules.functionalization.rule import FunctionalizationRule
from torchop._rules.kernels.rule import KernelRule
from torchop._rules.mutation.rule import MutationRule
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.vmap.rule import VmapRule

RULES: tuple[type[CompiledRule[Any]], ...] = (
    KernelRule,
    FakeRule,
    AutogradRule,
    MutationRule,
    VmapRule,
    AutocastRule,
    TorchDispatchRule,
    EffectRule,
    FunctionalizationRule,
    RecomputationRule,
)
definition.kinds = RULES
