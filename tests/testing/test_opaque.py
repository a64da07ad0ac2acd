"""`opcheck` and `check` of operators that take and return objects of opaque types."""

from __future__ import annotations

import dataclasses
from typing import Any, Optional

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing import check, opcheck


@torchop.opaque
class Scale:
    def __init__(self, number: float) -> None:
        self.number = number


@torchop.opaque(value=True)
@dataclasses.dataclass(frozen=True)
class Options:
    number: float = 2.0


@dataclasses.dataclass
class Result:
    y: Tensor
    scale: Optional[Scale]
    scales: list[Scale]
    options: Options


@pytest.fixture
def op(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, scale: Scale, others: list[Scale], options: Options) -> Result:
        return Result(x * scale.number * options.number, Scale(1.0), [*others], options)

    @torchop.custom_op(f"{namespace}::back", mutates_args=())
    def back(grad: Tensor, scale: Scale, options: Options) -> Tensor:
        return grad * scale.number * options.number

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.values = inputs[1], inputs[3]

    def backward(ctx: Any, grad: Any) -> Any:
        return back(grad.y, *ctx.values), None, None, None

    op.register_fake(
        lambda x, scale, others, options: Result(
            torch.empty_like(x), Scale(0.0), [Scale(0.0) for _ in others], options
        )
    )
    back.register_fake(lambda grad, scale, options: torch.empty_like(grad))
    op.register_autograd(backward, setup_context=save)
    back.register_autograd(
        lambda ctx, grad: (back(grad, *ctx.values), None, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "values", inputs[1:]),
    )
    return op


X = torch.tensor([1.0, 2.0])
ARGUMENTS = (Scale(3.0), [Scale(4.0)], Options())


@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_passes(op: Any, requires_grad: bool) -> None:
    results = opcheck(op, (X.clone().requires_grad_(requires_grad), *ARGUMENTS))
    assert set(results.values()) == {"SUCCESS"}


def test_opcheck_still_compares_the_tensors(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, scale: Scale) -> tuple[Tensor, Scale]:
        return x[:1] * scale.number, scale

    op.register_fake(lambda x, scale: (torch.empty_like(x), scale))
    with pytest.raises(torchop.testing.OpCheckError, match="test_faketensor"):
        opcheck(op, (X, Scale(3.0)))


def test_check_passes(op: Any) -> None:
    # The kernel promotes bool to float, and the fake kernel does not, so leave out dtypes.accepted.
    only = ("contracts", "memory", "values", "subsystems", "compiled")
    check(op, (X.clone().requires_grad_(), *ARGUMENTS), only=only)


def test_check_still_compares_the_tensors(op: Any, namespace: str) -> None:
    calls = []

    @torchop.custom_op(f"{namespace}::counting", mutates_args=())
    def counting(x: Tensor, scale: Scale) -> tuple[Tensor, Scale]:
        calls.append(x)
        return x * len(calls), scale

    counting.register_fake(lambda x, scale: (torch.empty_like(x), scale))
    with pytest.raises(torchop.testing.OpCheckError, match=r"contracts\.repeated"):
        check(counting, (X, Scale(3.0)), only=("contracts.repeated",))
