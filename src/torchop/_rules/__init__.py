"""The rules of an operator: one file each. A new rule is a new file and one line here."""

from __future__ import annotations

from typing import Any

from torchop import _plan
from torchop._plan import Rule
from torchop._rules.autocast import AutocastRule
from torchop._rules.autograd import AutogradRule
from torchop._rules.conjugation import ConjugationRule
from torchop._rules.effect import EffectRule
from torchop._rules.fake import FakeRule
from torchop._rules.functionalization import FunctionalizationRule
from torchop._rules.kernels import KernelRule
from torchop._rules.mutation import MutationRule
from torchop._rules.torch_dispatch import TorchDispatchRule
from torchop._rules.vmap import VmapRule

RULES: tuple[type[Rule[Any]], ...] = (
    KernelRule,
    FakeRule,
    AutogradRule,
    MutationRule,
    VmapRule,
    AutocastRule,
    TorchDispatchRule,
    EffectRule,
    FunctionalizationRule,
    ConjugationRule,
)
_plan.kinds = RULES
