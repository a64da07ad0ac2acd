"""What the extension says of a result: whether it is evidently fresh, and looks like a tensor."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torchop._native import switch


class Subclass(torch.Tensor):
    pass


def is_fresh(*args: object) -> bool:
    return bool(switch.native_module().is_evidently_fresh(*args))


X = torch.ones(2, 3)


def test_a_fresh_result_looks_like_a_tensor_or_not():
    assert is_fresh((X,), {}, torch.empty(2, 3))
    assert is_fresh((X,), {}, torch.empty(2, 3), X)
    assert is_fresh((X,), {}, torch.empty(3, 2).t(), X)  # strides are the kernel's concern


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(3), torch.ones(3)], layout=torch.strided)


LIKES = {
    "sizes": torch.ones(3, 2),
    "dimensions": torch.ones(6),
    "dtype": torch.ones(2, 3, dtype=torch.double),
    "device": torch.ones(2, 3, device="meta"),
    "layout": torch.ones(2, 3).to_sparse(),
    "subclass": torch.ones(2, 3).as_subclass(Subclass),
    "nested": nested(),
    "fake": FakeTensorMode().from_tensor(torch.ones(2, 3)),
    "no tensor": None,
}


@pytest.mark.parametrize("like", LIKES.values(), ids=LIKES)
def test_what_does_not_evidently_look_alike(like):
    assert not is_fresh((), {}, torch.empty(2, 3), like)


def test_what_is_not_evidently_fresh():
    for args, kwargs in (((X,), {}), (([X],), {}), ((), {"x": X})):
        assert not is_fresh(args, kwargs, X[:], X)
    assert not is_fresh((), {}, (X,), X)
    assert not is_fresh((), {}, None, X)


@pytest.mark.parametrize("args", [(), ((), {}), ([], {}, X), ((), [], X), ((), {}, X, X, X)])
def test_wrong_arguments(args):
    with pytest.raises(TypeError, match="expects arguments and a result"):
        is_fresh(*args)
