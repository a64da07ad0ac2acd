"""opcheck finds operators with out= that depend on what the output held."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchop


def define(namespace: str, write: Callable[[Tensor, Tensor], object]) -> torchop.CustomOp:
    @torchop.custom_op(
        f"{namespace}::op",
        mutates_args=("out",),
        schema="(Tensor x, *, Tensor(a!) out) -> Tensor(a!)",
    )
    def op(x: Tensor, *, out: Tensor) -> Tensor:
        write(x, out)
        return out

    return op


def _leaves_the_first(x: Tensor, out: Tensor) -> None:
    out[1:] = x[1:]


def _clears_by_multiplying(x: Tensor, out: Tensor) -> None:
    out.mul_(0).add_(x)


WRONG = {
    "reads": lambda x, out: out.add_(x),
    "leaves a part": _leaves_the_first,
    "writes nothing": lambda x, out: None,
}
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", WRONG)
def test_an_output_that_matters_is_found(namespace, name, dtype):
    op = define(namespace, WRONG[name])
    with pytest.raises(
        torchop.OpCheckError,
        match=rf"'out' of {namespace}::op\(.*depends on what the output held before.*"
        r"Write every element without reading it; or mutate a plain argument, without the tag",
    ):
        torchop.opcheck(
            op,
            (torch.zeros(3, dtype=dtype),),
            {"out": torch.zeros(3, dtype=dtype)},
            test_utils="test_schema",
        )


def test_clearing_by_multiplication_is_found_because_it_keeps_nan(namespace):
    op = define(namespace, _clears_by_multiplying)
    with pytest.raises(torchop.OpCheckError, match="depends on what the output held"):
        torchop.opcheck(op, (torch.ones(3),), {"out": torch.zeros(3)}, test_utils="test_schema")


RIGHT = {
    "writes all": lambda x, out: out.copy_(x * 2),
    "draws random numbers": lambda x, out: out.copy_(torch.rand(x.shape)),
    "writes in two steps": lambda x, out: out.zero_().add_(x),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", RIGHT)
def test_an_operator_that_only_writes_passes(namespace, name, dtype):
    op = define(namespace, RIGHT[name])
    x, out = torch.ones(3, dtype=dtype), torch.ones(3, dtype=dtype)
    torchop.opcheck(op, (x,), {"out": out}, test_utils="test_schema")
    assert torch.equal(out, x)  # the caller's is left alone


def test_what_differs_at_every_call_is_not_blamed_on_the_output(namespace):
    calls = iter(range(100))
    op = define(namespace, lambda x, out: out.fill_(next(calls)))
    torchop.opcheck(op, (torch.ones(3),), {"out": torch.zeros(3)}, test_utils="test_schema")


def test_only_the_output_that_matters_is_named(namespace):
    @torchop.custom_op(
        f"{namespace}::op",
        mutates_args=("a", "b"),
        schema="(Tensor x, *, Tensor(a!) a, Tensor(b!) b) -> (Tensor(a!), Tensor(b!))",
    )
    def op(x: Tensor, *, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return a.copy_(x), b.add_(x)

    with pytest.raises(torchop.OpCheckError, match="failed with 'b' of"):
        torchop.opcheck(
            op,
            (torch.ones(2),),
            {"a": torch.zeros(2), "b": torch.zeros(2)},
            test_utils="test_schema",
        )


def test_operators_without_the_tag_may_read_what_they_write(namespace):
    @torchop.custom_op(f"{namespace}::op", mutates_args=("out",))
    def op(x: Tensor, out: Tensor) -> None:
        out.add_(x)

    torchop.opcheck(op, (torch.ones(2), torch.zeros(2)), test_utils="test_schema")
