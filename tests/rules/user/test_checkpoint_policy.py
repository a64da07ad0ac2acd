"""Checkpoint policies for selective activation checkpointing. Uses private names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchop
from torchop import CustomOp
from torchop._compat import checkpointing, registries

VALUES = {"checkpoint_policy": "save"}

pytestmark = pytest.mark.filterwarnings("ignore:.*context_fn is passed.*")

# Leave out the policies that offload memory to the CPU.
POLICIES = list(CheckpointPolicy)[:4]
calls: list[str] = []


def define(namespace: str, policy: Any = None) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::sine", mutates_args=())
    def sine(x: Tensor, times: int = 1) -> Tensor:
        calls.append("sine")
        return x.sin()

    sine.register_fake(lambda x, times: torch.empty_like(x))
    sine.register_autograd(
        lambda ctx, grad: (grad * ctx.saved_tensors[0].cos(), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    if policy is not None:
        assert sine.register_checkpoint_policy(policy) is policy
    return sine


def train(sine: Callable[..., Tensor], region: Any, backend: str | None = None) -> int:
    """Return how often a training step calls the kernel.

    The kernel runs once if the checkpoint saves its result, and twice if the result is recomputed.
    """

    def step(x: Tensor) -> Tensor:
        return checkpoint(
            lambda x: sine(x * 2).exp().sum(),
            x,
            use_reentrant=False,
            context_fn=functools.partial(create_selective_checkpoint_contexts, region),
        )

    calls.clear()
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (step if backend is None else torch.compile(step, backend=backend, fullgraph=True))(
        x
    ).backward()
    torch.testing.assert_close(x.grad, 2 * (2 * x).cos() * (2 * x).sin().exp())
    return len(calls)


def preferring(policy: CheckpointPolicy) -> Callable[..., CheckpointPolicy]:
    return lambda ctx, op, *args, **kwargs: policy


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_operators_policy_applies_if_the_region_has_none(
    namespace: str, backend: str | None
) -> None:
    # Use three different names, because PyTorch's caches identify an operator by its name.
    assert train(define(namespace), [], backend) == 2
    assert train(define(f"{namespace}_save", "save"), [], backend) == 1
    assert train(define(f"{namespace}_recompute", "recompute"), [], backend) == 2


@pytest.mark.parametrize("own", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("region", POLICIES, ids=lambda policy: policy.name)
def test_precedence_of_policies(
    namespace: str, own: CheckpointPolicy, region: CheckpointPolicy
) -> None:
    deciding = own
    if region.name.startswith("MUST") and not own.name.startswith("MUST"):
        deciding = region
    expected = 1 if deciding.name.endswith("SAVE") else 2
    assert train(define(namespace, own), preferring(region)) == expected


def test_a_policy_may_depend_on_the_call(namespace: str) -> None:
    sine = define(namespace)

    @sine.register_checkpoint_policy
    def policy(ctx: Any, x: Tensor, times: int) -> Any:
        # Until 2.12, PyTorch calls the policy again while it recomputes, with is_recompute=True.
        assert ctx.is_recompute in (False, True)
        return "save" if times > 1 else CheckpointPolicy.PREFER_RECOMPUTE

    assert train(sine, []) == 2
    assert train(functools.partial(sine, times=2), []) == 1


def test_policy_does_not_affect_other_operators_of_the_region(namespace: str) -> None:
    sine, seen = define(namespace, "save"), []

    def region(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen.append(str(op))
        return CheckpointPolicy.PREFER_RECOMPUTE

    train(sine, region)
    assert f"{namespace}.sine.default" in seen, "the region is still asked"
    assert "aten.exp.default" in seen


def test_effect_is_not_repeated_under_any_policy(namespace: str) -> None:
    sine = define(namespace, "recompute")
    sine.register_effect("ordered")
    assert train(sine, [], "aot_eager") == 1
    other = define(f"{namespace}_other")
    other.register_effect("ordered")
    other.register_checkpoint_policy("recompute")
    assert train(other, [], "aot_eager") == 1


def test_an_operator_of_another_library_and_a_library_that_closes(namespace: str) -> None:
    rule, library = torchop.get_rule("checkpoint_policy"), torchop.Library(namespace, "FRAGMENT")
    sine = define(namespace)
    rule.register(sine.name, "save", lib=library)
    assert train(sine, []) == 1
    library.close()
    assert train(sine, []) == 2
    with torchop.Library("aten", "FRAGMENT") as aten:
        rule.register("aten::exp", CheckpointPolicy.MUST_SAVE, lib=aten)
        assert train(sine, [sine.overload]) == 1


def test_compile_caches_see_a_policy(namespace: str) -> None:
    def size(ctx: Any, x: Tensor, times: int) -> str:
        return "save"

    tags = {torchop.cache_key_tag()}
    sine = define(namespace)
    for policy in ("save", "recompute", size, lambda ctx, x, times: "recompute"):
        tags.add(torchop.cache_key_tag())
        sine.register_checkpoint_policy(policy)
    tags.add(torchop.cache_key_tag())
    assert len(tags) == 6


@pytest.mark.parametrize("wrong", ["keep", 3, True])
def test_invalid_policy_is_rejected(namespace: str, wrong: Any) -> None:
    with pytest.raises(
        torchop.RuleSignatureError,
        match=r"::sine: a checkpoint policy must be 'save', 'recompute', a",
    ):
        define(namespace, wrong)


def test_a_policy_takes_the_context_and_the_arguments(namespace: str) -> None:
    sine = define(namespace)
    with pytest.raises(torchop.RuleSignatureError, match=r"called with \(ctx, x, times\)"):
        sine.register_checkpoint_policy(lambda x: "save")
    sine.register_checkpoint_policy(lambda ctx, x, times: "keep")
    with pytest.raises(
        torchop.ResultError, match=r"::sine: .* must return a CheckpointPolicy, but returned 'keep'"
    ):
        train(sine, [])


@pytest.mark.skipif(not checkpointing.POLICY_MODES, reason="this PyTorch asks for no policies")
def test_helper_operator_uses_the_policy_after_its_own_was_removed(namespace: str) -> None:
    define(namespace, "save").derive_autograd()
    (mode, *_) = checkpointing.POLICY_MODES
    name = f"{namespace}::sine__training"
    before = registries.torch_dispatch_rule(name, mode)
    assert before is not None
    with torchop.Library(namespace, "FRAGMENT") as library:
        torchop.get_rule("checkpoint_policy").register(name, "save", lib=library)
    assert registries.torch_dispatch_rule(name, mode) is before
