"""opcheck supports samples that require grad and that the operator writes to.

Uses private names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop.testing._opcheck import DEFAULT_TEST_UTILS

SUCCESS = dict.fromkeys(DEFAULT_TEST_UTILS, "SUCCESS")
SAMPLES: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.randn(0),
    "not contiguous": lambda: torch.randn(3, 2).t(),
    "with an offset": lambda: torch.randn(10)[3:],
    "double": lambda: torch.randn(3, dtype=torch.double),
    "requires grad": lambda: torch.randn(3, requires_grad=True),
    "in a graph": lambda: torch.randn(3, requires_grad=True) * 1,
}


@pytest.fixture
def sin_into(namespace: str) -> Any:
    @torchop.custom_op(f"{namespace}::sin_into", mutates_args=("out",))
    def sin_into(x: Tensor, out: Tensor) -> None:
        out.copy_(x.sin())

    return sin_into


def _inplace(name: str, function: Callable[[Tensor], Tensor]) -> Any:
    return torchop.custom_op(
        name,
        function,
        mutates_args=("x",),
        schema="(Tensor(a!) x) -> Tensor(a!)",
    )


@pytest.fixture
def sin_(namespace: str) -> Any:
    return _inplace(f"{namespace}::sin_", lambda x: x.sin_())


@pytest.fixture
def exp_(namespace: str) -> Any:
    exp_ = _inplace(f"{namespace}::exp_", lambda x: x.exp_())

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    exp_.register_autograd(
        lambda ctx, grad: grad * ctx.saved_tensors[0], setup_context=setup_context
    )
    return exp_


@pytest.fixture
def sin_out(namespace: str) -> Any:
    @torchop.custom_op(
        f"{namespace}::sin_out",
        mutates_args=("out",),
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )
    def sin_out(x: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(x.sin())

    return sin_out


@pytest.mark.parametrize("make", SAMPLES.values(), ids=SAMPLES)
def test_all_operator_forms_pass_for_all_kinds_of_samples(
    make: Callable[[], Tensor], sin_into: Any, sin_: Any, exp_: Any, sin_out: Any
) -> None:
    x = make()
    assert torchop.opcheck(sin_, (make().detach(),)) == SUCCESS
    assert torchop.opcheck(exp_, (make(),)) == SUCCESS
    assert torchop.opcheck(sin_into, (x, torch.empty_like(make()))) == SUCCESS
    assert torchop.opcheck(sin_into, (x, make())) == SUCCESS
    assert torchop.opcheck(sin_out, (x,), {"out": make()}) == SUCCESS


def test_missing_formula_is_detected(sin_: Any) -> None:
    with pytest.raises(
        torchop.testing.OpCheckError, match="sin_ but no autograd formula was registered"
    ):
        torchop.opcheck(sin_, (torch.randn(3, requires_grad=True),))


def test_wrong_formula_of_an_in_place_operator_is_detected(sin_: Any) -> None:
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * float(grad.sum())  # incorrect, and compilers cannot trace `float`

    sin_.register_autograd(backward)
    with pytest.raises(torchop.testing.OpCheckError, match="test_aot_dispatch_dynamic"):
        torchop.opcheck(sin_, (torch.randn(3, requires_grad=True),))
