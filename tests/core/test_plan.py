"""An operator's call plan is immutable, and replaced in one assignment. Uses private names."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torchop
from tests._support.devices import TYPE
from torchop._rules import RULES
from torchop._rules.kernels.rule import KernelRule


class Mode(TorchDispatchMode):
    pass


def define(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


# Maps each kind of registration to the rule that it changes and to a function that performs it.
REGISTRATIONS = {
    "kernel": ("KernelRule", lambda op: op.register_kernel(TYPE)(lambda x: x + 2)),
    "fake": ("FakeRule", lambda op: op.register_fake(lambda x: torch.empty_like(x))),
    "autograd": ("AutogradRule", lambda op: op.register_autograd(lambda ctx, grad: grad)),
    "vmap": ("VmapRule", lambda op: op.register_vmap(lambda info, in_dims, x: (x, 0))),
    "autocast": ("AutocastRule", lambda op: op.register_autocast(TYPE, torch.float16)),
    "torch_dispatch": (
        "TorchDispatchRule",
        lambda op: op.register_torch_dispatch(Mode, lambda *args: None),
    ),
    "layout": ("LayoutRule", lambda op: op.register_layout(x=torchop.contiguous)),
    "effect": ("EffectRule", lambda op: op.register_effect(torchop.EffectType.ORDERED)),
}


def picture(plan):
    return {kind.__name__: plan[kind] for kind in RULES}


@pytest.mark.parametrize(("changed", "register"), REGISTRATIONS.values(), ids=REGISTRATIONS)
def test_registration_makes_a_new_plan_and_leaves_the_old_one(namespace, changed, register):
    op = define(namespace)
    old = op._definition.plan
    before = picture(old)
    register(op)
    new = op._definition.plan
    assert new is not old
    assert picture(old) == before
    assert picture(new)[changed] != before[changed]


def test_disabling_a_kernel_makes_a_new_plan_until_it_is_enabled(namespace):
    op = define(namespace)
    op.register_kernel(TYPE)(lambda x: x + 2)
    before = op._definition.plan[KernelRule].functions
    with op.set_kernel_enabled(TYPE, enabled=False):
        assert op._definition.plan[KernelRule].functions != before
    assert op._definition.plan[KernelRule].functions == before


FAILURES = {
    "kernel": lambda op: op.register_kernel(TYPE)(lambda: None),
    "device": lambda op: op.register_kernel("toaster")(lambda x: x),
    "fake": lambda op: op.register_fake(lambda: None),
    "autograd": lambda op: op.register_autograd(lambda: None),
    "setup_context": lambda op: op.register_autograd(lambda ctx, grad: None, setup_context=3),
    "vmap": lambda op: op.register_vmap(lambda: None),
    "autocast": lambda op: op.register_autocast(TYPE, torch.int8),
    "torch_dispatch": lambda op: op.register_torch_dispatch(int, print),
    "effect": lambda op: op.register_effect("ORDERED"),
}


@pytest.mark.parametrize("register", FAILURES.values(), ids=FAILURES)
def test_failed_registration_leaves_the_plan(namespace, register):
    op = define(namespace)
    old = op._definition.plan
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        register(op)
    assert op._definition.plan is old
