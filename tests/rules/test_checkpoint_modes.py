"""With an activation memory budget, a compiled backward recomputes results.

Uses private names.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch._functorch.config
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import torchop
from tests.integration.compile.graphs import BACKENDS, fresh_compiler
from torchop._rules.user.checkpoint_policy import register_checkpoint_policy

RANDOM = (torch.Tag.nondeterministic_seeded,)
BUDGETS = [
    0.0,
    0.5,
    *(pytest.param(budget, marks=pytest.mark.exhaustive) for budget in (0.1, 1.0)),
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    with fresh_compiler():
        yield


def _mask(x: Tensor) -> Tensor:
    return (torch.rand_like(x) > 0.5).to(x.dtype)


def _returning_the_mask(namespace: str) -> Any:
    op = torchop.custom_op(f"{namespace}::mask", _mask, mutates_args=(), tags=RANDOM)
    op.register_fake(like="x")
    return lambda x: x * op(x.detach())


def _returning_both(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::drop", mutates_args=(), tags=RANDOM)
    def drop(x: Tensor) -> tuple[Tensor, Tensor]:
        mask = _mask(x)
        return x * mask, mask

    drop.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    drop.register_autograd(
        lambda ctx, grad, _: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output[1]),
    )
    return lambda x: drop(x)[0]


def _derived(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::drop", mutates_args=(), tags=RANDOM)
    def drop(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    drop.register_fake(like="x")
    drop.derive_autograd()
    return drop


def _with_residuals(namespace: str) -> Any:
    @torchop.custom_op(
        f"{namespace}::drop", mutates_args=(), tags=RANDOM, residuals={"mask": Tensor}
    )
    def drop(x: Tensor) -> Tensor:
        mask = _mask(x)
        return torchop.residuals(x * mask, mask) if torchop.records_gradient() else x * mask

    drop.register_fake(lambda x: torchop.residuals(torch.empty_like(x), torch.empty_like(x)))
    drop.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0],
        setup_context=lambda ctx, inputs, output, residuals: ctx.save_for_backward(residuals.mask),
    )
    return drop


def _mutating(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::fill", mutates_args=("mask",), tags=RANDOM)
    def fill(mask: Tensor) -> None:
        mask.copy_(_mask(mask))

    def drop(x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        fill(mask)
        return x * mask

    return drop


def _mutating_a_list(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::fill", mutates_args=("masks",), tags=RANDOM)
    def fill(masks: list[Tensor]) -> list[Tensor]:
        for mask in masks:
            mask.copy_(_mask(mask))
        return [mask * 2 for mask in masks]

    fill.register_fake(lambda masks: [torch.empty_like(mask) for mask in masks])

    def drop(x: Tensor) -> Tensor:
        mask = torch.zeros_like(x)
        (doubled,) = fill([mask])
        return x * mask * doubled

    return drop


KINDS = (
    _returning_the_mask,
    _returning_both,
    _derived,
    _with_residuals,
    _mutating,
    _mutating_a_list,
)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_backward_uses_the_results_random_numbers(namespace, kind, budget):
    drop = kind(namespace)

    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        first = drop(x.sin() * 2).exp()
        return first, drop(first.cos()).exp()

    x = torch.ones(500, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        first, second = torch.compile(program, backend="aot_eager", fullgraph=True)(x)
        second.sum().backward()
    assert x.grad is not None
    # Where dropout's mask is 0, the result is exp(0) = 1, so the gradient must be 0 there.
    assert_close(x.grad == 0, (first == 1) | (second == 1))


def test_several_kinds_in_one_graph(namespace):
    drops = [kind(f"{namespace}{number}") for number, kind in enumerate(KINDS)]

    def program(x: Tensor) -> list[Tensor]:
        results = []
        for drop in drops:
            x = drop(x.cos() + 1).exp()
            results.append(x)
        return results

    x = torch.ones(500, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        results = torch.compile(program, backend="aot_eager", fullgraph=True)(x)
        results[-1].log().sum().backward()
    assert x.grad is not None
    assert_close(x.grad == 0, torch.stack([result == 1 for result in results]).any(0))


def _counted(namespace: str, calls: list[int]) -> Any:
    @torchop.custom_op(f"{namespace}::sine", mutates_args=())
    def sine(x: Tensor) -> Tensor:
        calls.append(x.numel())
        return x.sin()

    sine.register_fake(like="x")
    sine.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return sine


# Maps the name of a policy to the policy, and to whether this policy saves the result.
POLICIES: dict[str, tuple[Any, bool]] = {
    "none": (None, False),
    "save": ("save", True),
    "recompute": ("recompute", False),
    "must save": (CheckpointPolicy.MUST_SAVE, True),
    "a function": (lambda ctx, x: "save" if x.numel() > 1 else "recompute", True),
    "a function that does not save": (lambda ctx, x: "recompute", False),
}


@pytest.mark.parametrize("budget", [0.0, pytest.param(0.1, marks=pytest.mark.exhaustive), 0.5])
@pytest.mark.parametrize("name", POLICIES)
def test_policy_decides_what_is_saved(namespace, name, budget):
    policy, saves = POLICIES[name]
    calls: list[int] = []
    sine = _counted(namespace, calls)
    if policy is not None:
        sine.register_checkpoint_policy(policy)

    def program(x: Tensor) -> Tensor:
        return sine(sine(x * 2).exp()).exp()

    x = torch.ones(500, requires_grad=True)
    y = torch.ones(500, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        torch.compile(program, backend="aot_eager", fullgraph=True)(x).sum().backward()
    assert (len(calls) == 2) is saves
    program(y).sum().backward()
    assert_close(x.grad, y.grad)


def _two_results(namespace: str, calls: list[int]) -> Any:
    @torchop.custom_op(f"{namespace}::pair", mutates_args=())
    def pair(x: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(x.numel())
        return x.sin(), x.exp()

    pair.register_fake(lambda x: (torch.empty_like(x), torch.empty_like(x)))
    pair.register_autograd(
        lambda ctx, g, h: g * ctx.saved_tensors[0].cos() + h * ctx.saved_tensors[1],
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1]),
    )
    return pair


def _in_region(function: Any, **options: Any) -> Any:
    return lambda x: checkpoint(function, x, use_reentrant=False, **options)


REGIONS = {
    "no region": lambda function: function,
    "checkpoint": _in_region,
    "selective": lambda function: _in_region(
        function, context_fn=functools.partial(create_selective_checkpoint_contexts, [])
    ),
}


@pytest.mark.parametrize("budget", [0.5, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("policy", ["save", "recompute"])
@pytest.mark.parametrize("kind", [_counted, _two_results])
def test_every_subsystem_applies_the_policy(namespace, kind, policy, region, backend, budget):
    calls: list[int] = []
    op = kind(namespace, calls)
    op.register_checkpoint_policy(policy)

    def block(x: Tensor) -> Tensor:
        result = op(x * 2)
        return (result if isinstance(result, Tensor) else torch.stack(result)).sin()

    def program(x: Tensor) -> Tensor:
        return REGIONS[region](block)(x.cos()).sum()

    x = torch.ones(500, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        result = torch.compile(program, backend=backend, fullgraph=True)(x)
        calls.clear()
        result.backward()
    assert len(calls) == (0 if policy == "save" else 1)
    y = torch.ones(500, requires_grad=True)
    block(y.cos()).sum().backward()  # the sine makes the backward read the operator's result
    assert_close(x.grad, y.grad)


def test_only_selective_checkpointing_applies_a_policy_in_eager_mode(namespace):
    calls: list[int] = []
    op = _counted(namespace, calls)
    for policy, saved in (("save", ["no region", "selective"]), ("recompute", ["no region"])):
        op.register_checkpoint_policy(policy)
        for name, region in REGIONS.items():
            result = region(lambda x: op(x * 2).sin())(torch.ones(5, requires_grad=True))
            calls.clear()
            result.sum().backward()
            assert len(calls) == (0 if name in saved else 1)


def test_recomputation_does_not_repeat_effects_or_random_numbers(namespace):
    calls: list[int] = []
    logged: list[str] = []
    sine = _counted(namespace, calls)
    sine.register_checkpoint_policy("recompute")
    drop = _derived(namespace)
    drop.register_checkpoint_policy("recompute")

    @torchop.custom_op(f"{namespace}::log", mutates_args=(), effects="ordered")
    def log(x: Tensor) -> None:
        logged.append("log")

    def program(x: Tensor) -> Tensor:
        y = sine(x * 2)
        log(y)
        return drop(y.sin())

    x = torch.ones(500, requires_grad=True)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        x.grad = None
        calls.clear()
        logged.clear()
        result = torch.compile(program, backend=backend, fullgraph=True)(x)
        result.sum().backward()
        assert_close(x.grad == 0, result == 0)
        assert (len(calls), len(logged)) == (2, 1)


@pytest.mark.parametrize("region", CheckpointPolicy)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_an_effect_happens_once_in_a_selective_checkpoint(namespace, backend, region):
    logged: list[float] = []

    @torchop.custom_op(f"{namespace}::log", mutates_args=(), effects="ordered")
    def log(x: Tensor) -> Tensor:
        logged.append(float(x.sum()))
        return x * 2

    log.register_fake(like="x")
    log.register_autograd(lambda ctx, grad: grad * 2)
    contexts = functools.partial(create_selective_checkpoint_contexts, lambda *_, **__: region)

    @torch.compile(backend=backend)
    def program(x: Tensor) -> Tensor:
        return checkpoint(lambda x: log(x + 1).sin(), x, use_reentrant=False, context_fn=contexts)

    x = torch.ones(3, requires_grad=True)
    program(x).sum().backward()
    assert logged == [6.0]
    assert_close(x.grad, 2 * torch.full((3,), 4.0).cos())


def test_a_deregistered_policy_is_ignored(namespace):
    calls: list[int] = []
    sine = _counted(namespace, calls)
    with torchop.Library(namespace, "FRAGMENT") as library:
        register_checkpoint_policy(f"{namespace}::sine", "save", lib=library)
    x = torch.ones(500, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=0.1):
        torch.compile(lambda x: sine(sine(x * 2).exp()).exp(), backend="aot_eager")(
            x
        ).sum().backward()
    assert len(calls) > 2


def test_operators_of_pytorch_draw_other_numbers():
    # PyTorch's own dropout draws new numbers when it is recomputed, so its gradient is incorrect.
    # Therefore the documentation only makes a promise for torchop's operators.
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.nn.functional.dropout(x.sin() * 2).exp()
        return first, torch.nn.functional.dropout(first.cos()).exp()

    x = torch.ones(500, requires_grad=True)
    with torch._functorch.config.patch(activation_memory_budget=0.0):
        first, second = torch.compile(program, backend="aot_eager", fullgraph=True)(x)
        second.sum().backward()
    assert not torch.equal(x.grad == 0, (first == 1) | (second == 1))
