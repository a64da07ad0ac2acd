from __future__ import annotations

import inspect
import typing
from typing import Annotated

import pytest
import torch
from torch import Tensor

import torchop

Cube = Annotated[Tensor, "of x", torchop.Residuals(slope=Tensor)]


def written(x: Tensor) -> Annotated[Tensor, torchop.Residuals(slope=Tensor)]:
    return torchop.residuals(x**3, 3 * x**2)


def by_name(x: Tensor) -> Cube:
    return torchop.residuals(x**3, 3 * x**2)


def several(
    x: Tensor,
) -> Annotated[tuple[Tensor, Tensor], torchop.Residuals(slope=Tensor, mask=Tensor | None)]:
    return torchop.residuals((x**3, x + 1), 3 * x**2, None)


def evaluated(x):
    return torchop.residuals(x**3, 3 * x**2)


evaluated.__annotations__ = {"x": Tensor, "return": Cube}

RETURNED = {
    written: Tensor,
    by_name: Annotated[Tensor, "of x"],
    several: tuple[Tensor, Tensor],
    evaluated: Annotated[Tensor, "of x"],
}


def keep(ctx, inputs, output, residuals):
    ctx.save_for_backward(residuals.slope)


def train(op):
    op.register_autograd(lambda ctx, *grads: grads[0] * ctx.saved_tensors[0], setup_context=keep)
    x = torch.tensor([2.0], requires_grad=True)
    for _ in range(2):
        result = op(x)
        first = result[0] if isinstance(result, tuple) else result
        assert torch.autograd.grad(first, x)[0].item() == 12.0


@pytest.mark.parametrize("kernel", RETURNED, ids=lambda kernel: kernel.__name__)
def test_callers_get_the_result_without_residuals(namespace, kernel):
    op = torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())
    assert inspect.signature(op).return_annotation == RETURNED[kernel]
    assert op.__annotations__["return"] == RETURNED[kernel]
    assert typing.get_type_hints(op)["return"] in (Tensor, tuple[Tensor, Tensor])
    assert "slope" not in str(op.schema)
    train(op)


def test_a_class(namespace):
    @torchop.operator(f"{namespace}::op")
    class op:
        @staticmethod
        def forward(x: Tensor) -> Cube:
            return torchop.residuals(x**3, 3 * x**2)

    train(op)
    assert "Residuals" not in str(inspect.signature(op))


def test_residuals_are_declared_once(namespace):
    message = rf"{namespace}::op: .*more than once: torchop\.Residuals\(slope\)"
    with pytest.raises(torchop.SchemaError, match=message):
        torchop.custom_op(f"{namespace}::op", written, mutates_args=(), residuals={"slope": Tensor})


def test_wrong_types(namespace):
    def kernel(x: Tensor) -> Annotated[Tensor, torchop.Residuals(slope=torch.nn.Module)]:
        return x.clone()

    with pytest.raises(torchop.SchemaError, match=rf"{namespace}::op: residuals=.*unsupported"):
        torchop.custom_op(f"{namespace}::op", kernel, mutates_args=())


def test_triton_operators_have_no_residuals(namespace):
    with pytest.raises(torchop.SchemaError, match=r"triton_op does not support residuals"):
        torchop.triton_op(f"{namespace}::op", written, mutates_args=())
    assert not hasattr(getattr(torch.ops, namespace), "op")
