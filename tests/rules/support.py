import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import torchop
from tests._support.common import on_both

# --------------------------------------------------------------------------------------------------
# Operators


def adding_one(namespace, library=torchop, **options):
    @library.custom_op(f"{namespace}::op", mutates_args=(), **options)
    def op(x: Tensor) -> Tensor:
        return x + 1

    return op


def cloning(namespace, library=torchop, **options):
    @library.custom_op(f"{namespace}::op", mutates_args=(), **options)
    def op(x: Tensor) -> Tensor:
        return x.clone()

    return op


def with_formula(namespace, function, backward, setup_context=None, library=torchop, **options):
    op = library.custom_op(f"{namespace}::op", function, mutates_args=(), **options)
    op.register_autograd(backward, setup_context=setup_context)
    return op


def save_inputs(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


# --------------------------------------------------------------------------------------------------
# Calls


def leaf(value: float = 1.0) -> Tensor:
    return torch.full((2,), value, requires_grad=True)


def leaf_of(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


def on_meta(op) -> Tensor:
    return op(torch.ones(3, device="meta"))


def on_fake(op) -> Tensor:
    with FakeTensorMode():
        return op(torch.ones(3))


def on_symbols(op) -> Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(torch.ones(3))
    with mode:
        return op(x)


# --------------------------------------------------------------------------------------------------
# Errors


def assert_only_torchop_rejects(namespace, scenario, error, *words):
    """Check that the scenario raises an error with torchop, and none with torch.library.

    The error's message must contain all of `words`.
    """
    both = on_both(scenario, namespace)
    assert not isinstance(both.stock, Exception)
    assert isinstance(both.ours, error)
    for text in words:
        assert text in str(both.ours)
