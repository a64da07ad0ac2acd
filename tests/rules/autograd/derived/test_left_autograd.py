"""Following where the value of a tensor left autograd."""

import pytest
import torch

from torchop._rules.autograd.derived.differentiate import Watching


def left(function):
    x = torch.tensor([0.5], requires_grad=True)
    watching = Watching()
    return watching.left(watching.run(lambda inputs: function(*inputs), [x]))


def without_grad(x):
    with torch.no_grad():
        return x * 2


def through_numpy_and_back(x):
    return torch.from_numpy(x.detach().numpy() * 2) + 1


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.detach(), "torch.Tensor.detach"),
        (lambda x: (x.detach() * 2).sum(), "torch.Tensor.detach"),
        (lambda x: torch.stack([x.detach(), torch.ones(1)]), "torch.Tensor.detach"),
        (lambda x: x.sin().data, "torch.Tensor.data"),
        (without_grad, "torch.Tensor.mul"),
        (through_numpy_and_back, "torch.Tensor.detach"),
    ],
)
def test_what_left_is_named(function, name):
    assert name in left(function)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sin(),
        torch.zeros_like,
        lambda x: x.new_ones(3),
        lambda x: x.detach().new_ones(3),
        lambda x: torch.ones(x.shape),
        lambda x: torch.zeros(1) if x.item() > 0 else x,
        lambda x: x.argmax(),
        lambda x: torch.full((2,), x.item()),  # which cannot be told from a decision
    ],
)
def test_what_did_not_leave_is_not(function):
    assert left(function) is None
