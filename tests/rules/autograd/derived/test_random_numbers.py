import functools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests._support.devices import TYPE
from tests.rules.autograd.derived.support import derived, dropout


@pytest.mark.parametrize("is_default", [True, False])
def test_backward_does_not_advance_a_reseeded_generator(namespace, is_default):
    def noisy(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return x * torch.rand(x.shape, generator=generator)

    op = derived(f"{namespace}::f", noisy)
    generator = torch.default_generator if is_default else torch.Generator()
    generator.manual_seed(5)
    x = torch.ones(4, requires_grad=True)
    y = op(x) if is_default else op(x, generator)
    generator.manual_seed(5)
    state = generator.get_state()
    y.sum().backward()
    assert_close(x.grad, y.detach())
    assert torch.equal(generator.get_state(), state)


def test_a_generator_among_the_arguments_is_replayed(namespace):
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.rand(x.shape, generator=generator)

    op = derived(f"{namespace}::f", noisy)
    x = torch.ones(4, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    y = op(x, generator)
    state = generator.get_state()
    y.sum().backward()
    assert_close(x.grad, y.detach())
    assert torch.equal(generator.get_state(), state)


def test_a_batch_of_gradients_shares_the_random_numbers_of_the_forward(namespace):
    op = derived(f"{namespace}::f", dropout)
    x = torch.ones(5, requires_grad=True)
    y = op(x)
    (jacobian,) = torch.autograd.grad(y, x, torch.eye(5), is_grads_batched=True)
    assert torch.equal(jacobian, y.detach().diag())


def test_random_numbers_are_replayed_by_a_checkpoint_too(namespace):
    op = derived(f"{namespace}::f", dropout)

    def train(function):
        torch.manual_seed(5)
        x = torch.ones(100, requires_grad=True)
        y = checkpoint(lambda x: function(x).sin() * function(x), x, use_reentrant=False)
        y.sum().backward()
        return x.grad

    assert torch.equal(train(op), train(dropout))


def test_selective_checkpointing_may_save_the_operator(namespace):
    op = derived(f"{namespace}::f", dropout)
    contexts = functools.partial(create_selective_checkpoint_contexts, [op.overload])
    x = torch.ones(100, requires_grad=True)

    def train(function):
        torch.manual_seed(5)
        y = checkpoint(lambda x: function(x).sin(), x, use_reentrant=False, context_fn=contexts)
        return torch.autograd.grad(y.sum(), x)[0]

    assert torch.equal(train(op), train(dropout))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("ignore:Detected that context_fn")
def test_checkpointed_operator_reuses_its_random_numbers(namespace, compiled):
    calls = []

    def body(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.nn.functional.dropout(x, 0.5)

    op = derived(f"{namespace}::f", body, tags=torch.Tag.nondeterministic_seeded)
    op.register_fake(like="x")
    x = torch.rand(100, requires_grad=True)

    def region(x):
        return op(op(x).sin() + 1).sin()

    def train(function):
        torch.manual_seed(5)
        y = function(x).sum()
        calls.clear()
        return torch.autograd.grad(y, x)[0]

    def calls_of_training(saved):
        contexts = functools.partial(create_selective_checkpoint_contexts, saved)

        def function(x):
            return checkpoint(region, x, use_reentrant=False, context_fn=contexts)

        if compiled:
            torch._dynamo.reset()
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        # On CUDA, compiled checkpoints draw different random numbers than eager ones by default.
        with torch._inductor.config.patch(fallback_random=TYPE != "cpu"):
            assert torch.equal(train(function), train(region))
            train(function)
        return len(calls)

    # The derived formula runs both calls a second time to differentiate them. If the checkpoint
    # recomputes the calls, there are two more.
    assert calls_of_training([op.overload]) == 2
    assert calls_of_training([]) == 4
    op.register_checkpoint_policy("save")
    assert calls_of_training([]) == 2
