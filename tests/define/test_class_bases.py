from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torchop


class Elementwise:
    """A base class with rules that several operators share."""

    @staticmethod
    def fake(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @staticmethod
    def examples() -> Any:
        yield (torch.randn(3),)


def test_base_classes_share_rules(namespace: str) -> None:
    @torchop.operator(f"{namespace}::negate")
    class negate(Elementwise):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return -x

    @torchop.operator(f"{namespace}::double")
    class double(Elementwise):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def examples() -> Any:
            yield (torch.ones(2),)

    for op in (negate, double):
        assert op(torch.ones(1, device="meta")).is_meta
        torchop.opcheck(op)
    assert torch.equal(double.examples()[0][0][0], torch.ones(2)), "the nearest member counts"
    assert double.__doc__ is None, "a base class describes itself"


def test_none_removes_a_base_class_member(namespace: str) -> None:
    class Invertible(Elementwise):
        inplace = True

        @staticmethod
        def inverse(output: Tensor) -> Tensor:
            return -output

    @torchop.operator(f"{namespace}::relu")
    class relu(Invertible):
        inverse = None
        inplace = False
        tags = None

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.relu()

    assert not torchop.get_rule("inverse").has(relu)
    assert relu.inplace is None
    assert torchop.get_rule("examples").has(relu)


def test_operators_that_share_forward_are_distinguished(namespace: str) -> None:
    class Base:
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return -x

    @torchop.operator(f"{namespace}::first")
    class first(Base):
        pass

    with pytest.warns(torchop.RedefinitionWarning, match="defined again"):

        @torchop.operator(f"{namespace}::first")
        class second(Base):
            pass

    assert (first.__name__, second.__name__) == ("first", "second")
    with pytest.raises(torchop.OperatorGoneError, match="replaced"):
        first(torch.ones(1))


def test_private_members_of_a_class_are_ignored(namespace: str) -> None:
    @torchop.operator(f"{namespace}::double")
    class double:
        _factor = 2

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x * 2

        def _helper(self) -> None: ...

        def __len__(self) -> int:
            return 0

    assert torch.equal(double(torch.ones(1)), torch.tensor([2.0]))
