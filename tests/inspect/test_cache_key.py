"""cache_key_tag: what changes the key of compile caches, and that PyTorch honours it."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.forking import run_compiling
from tests.support import assert_clean


@pytest.fixture
def op(namespace: str) -> Any:
    def double(x: Tensor) -> Tensor:
        return x * 2

    return torchop.custom_op(f"{namespace}::double", double, mutates_args=())


def _backward_by_two(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 2


def _backward_by_three(ctx: Any, grad: Tensor) -> Tensor:
    return grad * 3


def test_tag_is_the_same_for_the_same_rules(op: Any) -> None:
    op.register_autograd(_backward_by_two)
    before = torchop.cache_key_tag()
    op.register_autograd(_backward_by_two)
    assert torchop.cache_key_tag() == before


@pytest.mark.parametrize("rule", ["fake", "backward", "setup_context", "effect"])
def test_tag_changes_with_a_rule(op: Any, namespace: str, rule: str) -> None:
    op.register_autograd(_backward_by_two)
    before = torchop.cache_key_tag()
    if rule == "fake":
        op.register_fake(lambda x: torch.empty_like(x))
    elif rule == "backward":
        op.register_autograd(_backward_by_three)
    elif rule == "setup_context":
        op.register_autograd(_backward_by_two, setup_context=lambda ctx, inputs, output: None)
    else:
        op.register_effect(torchop.EffectType.ORDERED)
    assert torchop.cache_key_tag() != before


def test_tag_does_not_change_with_a_kernel(op: Any) -> None:
    before = torchop.cache_key_tag()
    op.register_kernel("cpu", lambda x: x + x)
    assert torchop.cache_key_tag() == before


# Dynamo's reset leaves no graph in the memory of the process, so what a compile finds is in the
# folder of the cache, as in a process that starts after the formula was edited.
_PROGRAM = """
import sys, torch, torchop
from torch._dynamo.utils import counters

factors = {"two": lambda ctx, grad: grad * 2, "three": lambda ctx, grad: grad * 3}
for tag in ("untagged", "tagged"):
    @torchop.custom_op(f"{tag}_{sys.argv[1]}::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    double.register_fake(lambda x: torch.empty_like(x))
    for formula, backward in factors.items():
        double.register_autograd(backward)
        if tag == "tagged":
            torch.compiler.config.cache_key_tag = torchop.cache_key_tag()
        torch._dynamo.reset()
        counters.clear()
        x = torch.ones(2, requires_grad=True)
        torch.compile(lambda x: double(x) + 1, fullgraph=True)(x).sum().backward()
        hits = counters["aot_autograd"]["autograd_cache_hit"]
        print(tag, formula, x.grad[0].item(), hits)
"""


def test_edited_formula_is_compiled_again_only_with_the_tag() -> None:
    # No cache knows it, so the cache need not be a new one, for which Inductor would compile anew
    # what tells it the vectors of the machine.
    done = run_compiling(_PROGRAM, f"cached_{uuid.uuid4().hex}")
    assert assert_clean(done).splitlines() == [
        "untagged two 2.0 0",
        "untagged three 2.0 1",
        "tagged two 2.0 0",
        "tagged three 3.0 0",
    ]
