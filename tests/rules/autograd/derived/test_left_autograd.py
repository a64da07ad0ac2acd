"""Following where the value of a tensor left autograd."""

import pytest
import torch

from torchop._rules.autograd.derived.differentiate import DependencyMode


def left(function):
    x = torch.tensor([0.5], requires_grad=True)
    mode = DependencyMode()
    return mode.left_autograd_in(mode.run(lambda inputs: function(*inputs), [x]))


def without_grad(x):
    with torch.no_grad():
        return x * 2


def copied(x):
    y = torch.zeros_like(x)
    return y.copy_(x.detach())


def assigned(x):
    y = torch.zeros_like(x)
    y[:] = x.detach()
    return y


def written_by_out(x):
    return torch.mul(x.detach(), 2, out=torch.empty_like(x))


def written_into_a_view(x):
    y = torch.zeros(2, 1)
    y[0].copy_(x.detach())
    return y


def written_without_grad(x):
    y = torch.zeros_like(x)
    with torch.no_grad():
        y += x
    return y * 2


def chosen_by_an_index_copied(x):
    index = torch.zeros(1, dtype=torch.long)
    return torch.arange(3.0)[index.copy_(x.abs().clamp(max=2))]


def chosen_by_an_index_assigned(x):
    index = torch.zeros(1, dtype=torch.long)
    index[:] = x.abs().clamp(max=2)
    return torch.arange(3.0)[index]


def chosen_by_a_mask_written_by_out(x):
    mask = torch.gt(x, 0, out=torch.zeros(1, dtype=torch.bool))
    return torch.where(mask, 1.0, 2.0)


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
        (copied, "torch.Tensor.detach"),
        (assigned, "torch.Tensor.detach"),
        (written_by_out, "torch.Tensor.detach"),
        (written_into_a_view, "torch.Tensor.detach"),
        (written_without_grad, "torch.Tensor.add_"),
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
        lambda x: torch.zeros(1).add_(1),
        lambda x: torch.zeros(1).copy_(x),
        lambda x: torch.zeros(1)[:].fill_(x.shape[0]),
        chosen_by_an_index_copied,
        chosen_by_an_index_assigned,
        chosen_by_a_mask_written_by_out,
        lambda x: torch.full((2,), x.item()),  # which cannot be told from a decision
    ],
)
def test_what_did_not_leave_is_not(function):
    assert left(function) is None
