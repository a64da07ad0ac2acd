"""If a kernel returns None for an optional result, the rules of the operator get None, too."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import torchop


class Pair(NamedTuple):
    double: Tensor
    triple: Tensor | None


def single(x: Tensor, both: bool = True) -> Tensor | None:
    return x * 2 if both else None


def pair(x: Tensor, both: bool = True) -> tuple[Tensor, Tensor | None]:
    return x * 2, x * 3 if both else None


def named(x: Tensor, both: bool = True) -> Pair:
    return Pair(*pair(x, both))


def by_hand(x, both=True):
    return pair(x, both)


def in_a_list(x, both=True):
    return list(pair(x, both))


SCHEMAS = {by_hand: "(Tensor x, bool both=True) -> (Tensor, Tensor?)"}
SCHEMAS[in_a_list] = "(Tensor x, bool both=True) -> Tensor?[]"


def first(result: Any) -> Any:
    return result if result is None or isinstance(result, Tensor) else result[0]


def use(op: Any, x: Tensor, both: bool) -> Tensor:
    result = first(op(x, both))
    return x if result is None else result


@pytest.fixture(params=[single, pair, named, by_hand, in_a_list], ids=lambda fn: fn.__name__)
def function(request: Any) -> Any:
    return request.param


@pytest.fixture
def op(namespace: str, function: Any) -> Any:
    return torchop.custom_op(
        f"{namespace}::op", function, mutates_args=(), schema=SCHEMAS.get(function)
    )


X = torch.tensor([1.0, 2.0])


def gradient(op: Any, both: bool, call: Any = use) -> list[float]:
    x = X.clone().requires_grad_()
    call(op, x, both).sum().backward()
    assert x.grad is not None
    return x.grad.tolist()


@pytest.mark.parametrize("both", [True, False])
def test_calls_fake_kernels_and_formulas(op: Any, function: Any, both: bool) -> None:
    expected = function(X, both)
    for _ in range(3):
        assert str(op(X, both)) == str(expected)
    op.register_fake(function)
    with FakeTensorMode() as mode:
        fake = op(mode.from_tensor(X), both)
    assert isinstance(fake, type(expected))
    assert (fake is None) is (expected is None)
    outputs = []

    def setup_context(ctx, inputs, output):
        outputs.append(output)

    def backward(ctx, *grads):
        grad = first(grads[0])
        return None if grad is None else grad * 2, None

    op.register_autograd(backward, setup_context=setup_context)
    slope = 1 if function is single and not both else 2
    assert gradient(op, both) == [slope, slope]
    if slope == 2:
        assert type(outputs[-1]) is (Tensor if function is single else type(expected))
        assert function is single or (outputs[-1][1] is None) is not both
    compiled = torch.compile(use, backend="aot_eager", fullgraph=True)
    assert gradient(op, both, compiled) == [slope, slope]


@pytest.mark.parametrize("both", [True, False])
def test_derived_formulas_and_vmap_rules(op: Any, function: Any, both: bool) -> None:
    op.derive_autograd()
    slope = 1 if function is single and not both else 2
    assert gradient(op, both) == [slope, slope]

    def dims(result: Any) -> Any:
        if result is None or isinstance(result, Tensor):
            return None if result is None else 0
        return type(result)(*map(dims, result)) if function is named else [*map(dims, result)]

    def one_for_all(info, in_dims, x, both):
        return function(x, both), 0

    def one_for_each(info, in_dims, x, both):
        result = function(x, both)
        each = dims(result)
        return result, tuple(each) if type(each) is list and function is not in_a_list else each

    for rule in ("sequential", one_for_all, one_for_each):
        op.register_vmap(rule)
        batched = torch.vmap(lambda x: use(op, x, both))(X[None])
        assert batched.tolist() == [[slope * value for value in X.tolist()]]


@pytest.mark.parametrize("both", [True, False])
def test_rules_that_calls_do_not_read(op: Any, function: Any, both: bool) -> None:
    shapes = []

    def formula(x, both, *, out_shape):
        shapes.append(out_shape)
        return 5

    def shape(result: Any) -> Any:
        return None if result is None else tuple(result.shape)

    op.register_flop_formula(formula)
    with FlopCounterMode(display=False) as counter:
        result = op(X, both)
    assert counter.get_total_flops() == 5
    if function is single:
        assert shapes[-1] == shape(result)
    else:
        assert [*shapes[-1]] == [*map(shape, result)]
    assert isinstance(shapes[-1], Pair) is (function is named)

    op.register_inverse(lambda out, both: None if first(out) is None else first(out) / 2)
    undone = torchop.inverse(op)(op(X, both), both)
    assert str(undone) == str(X if function is not single or both else None)

    op.register_examples(lambda: [(X,), (X, both)])
    assert len(op.examples()) == 2

    op.derive_autograd()
    contexts = functools.partial(
        create_selective_checkpoint_contexts, lambda *args, **kwargs: False
    )
    for policy in ("save", "recompute", lambda ctx, x, both: "save"):
        op.register_checkpoint_policy(policy)

        def checkpointed(op, x, both):
            return checkpoint(use, op, x, both, use_reentrant=False, context_fn=contexts)

        assert gradient(op, both, checkpointed) == gradient(op, both)
