from __future__ import annotations

from typing import Any, Literal, Optional

import pytest
import torch
from torch import Tensor

import torchop
from tests._support.releases import needs_tags
from tests.schema.structure.structures import Frozen, Mode, WithTensor
from torchop import ArgumentError, SchemaError


def test_positional_only_parameters_stay_positional(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, n: int, /, handle: int = 2) -> Tensor:
        return x * n * handle

    assert op(torch.ones(1), 3, handle=5).item() == 15
    with pytest.raises(TypeError, match="positional-only"):
        op(torch.ones(1), n=3)  # type: ignore[call-arg]


def test_a_tensor_in_a_structure_can_be_mutated(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=("cfg.weight",))
    def op(x: Tensor, cfg: WithTensor) -> None:
        cfg.weight.add_(x)

    assert "Tensor(a1!) cfg_weight, Tensor? cfg_bias=None" in op._schema
    weight = torch.zeros(2)
    op(torch.ones(2), WithTensor(weight))
    torch.compile(op, fullgraph=True, backend="aot_eager")(torch.ones(2), WithTensor(weight))
    assert weight.tolist() == [2, 2]
    with pytest.raises(
        SchemaError, match=r"'cfg\.scale'.* not found .* arguments are x, cfg\.weight, cfg\.bias"
    ):
        torchop.custom_op(f"{namespace}::other", op.__wrapped__, mutates_args=("cfg.scale",))


Table = dict[str, int]


def test_parameters_may_have_names_of_builtins(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(
        x: Tensor,
        type: Literal["a", "b"],
        list: tuple[int, ...] = (1,),
        dict: Table = {"first": 1},  # noqa: B006  (the default is never mutated)
        tuple: Optional[Frozen] = None,
        result: Frozen = Frozen(1.0),  # noqa: B008
        names: list[str] = ["n"],  # type: ignore[valid-type]  # noqa: B006
    ) -> tuple[Tensor, ...]:  # type: ignore[valid-type]
        return x * list[0], x * dict["first"]

    first, second = op(torch.ones(1), "a")
    assert (first.item(), second.item()) == (1, 1)
    with pytest.raises(ArgumentError, match="type: expected one of 'a', 'b', got 'c'"):
        op(torch.ones(1), "c")  # type: ignore[arg-type]


def test_errors_of_the_dispatcher_have_a_fix(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(error: Tensor, explained: Frozen, xs: list[Tensor]) -> Tensor:
        return error * explained.scale

    x = torch.ones(1)
    assert op(x, Frozen(2), [x]).item() == 2
    with pytest.raises(ArgumentError, match=rf"{namespace}::op.* Pass a list, even for one: xs="):
        op(x, Frozen(2), x)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["_operator", "_check_float", "_Frozen", "type"])
def test_function_may_have_any_name_used_by_generated_code(namespace: str, name: str) -> None:
    def function(x: Tensor, cfg: Frozen) -> Tensor:
        return x * cfg.scale

    function.__name__ = name
    op = torchop.custom_op(f"{namespace}::op", function, mutates_args=())
    assert op(torch.ones(1), Frozen(2)).item() == 2


def test_an_error_is_raised_by_a_tracer_too(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, cfg: Frozen) -> Tensor:
        return x.clone()

    compiled = torch.compile(lambda x: op(x, Frozen("2")), fullgraph=True, backend="eager")  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"::op: cfg\.scale: expected float, got str"):
        compiled(torch.ones(1))


def test_a_graph_of_an_operator_that_was_replaced_does_not_call_the_new_one(
    namespace: str,
) -> None:
    def define(factor: int) -> Any:
        @torchop.custom_op(f"{namespace}::op", mutates_args=())
        def op(x: Tensor, cfg: Frozen) -> Tensor:
            return x * factor

        op.register_fake(lambda x, cfg: torch.empty_like(x))
        return op

    old = define(2)
    compiled = torch.compile(lambda x: old(x, Frozen(1.0)), fullgraph=True, backend="aot_eager")
    assert compiled(torch.ones(1)).item() == 2
    new = define(3)
    with pytest.raises(Exception, match="It was replaced by the definition"):
        compiled(torch.ones(1))
    with pytest.raises(torchop.OperatorGoneError, match="It was replaced by the definition"):
        old(torch.ones(1), Frozen(1.0))
    assert new(torch.ones(1), Frozen(1.0)).item() == 3


@needs_tags
def test_in_place_and_out_operators_take_structures(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::op_", mutates_args=("x",), tags=torch.Tag.inplace)
    def op_(x: Tensor, cfg: Frozen) -> Tensor:
        return x.mul_(cfg.scale)

    @torchop.custom_op(f"{namespace}::op.out", mutates_args=("low", "out"), tags=torch.Tag.out)
    def op_out(
        cfg: WithTensor, x: Tensor, *, mode: Mode = Mode.CUBIC, low: Tensor, out: Tensor
    ) -> tuple[Tensor, Tensor]:
        return torch.mul(x, cfg.weight, out=low), torch.add(x, cfg.weight, out=out)

    x, low, out = torch.ones(1), torch.empty(1), torch.empty(1)
    assert op_(x, Frozen(3.0)) is x
    assert x.item() == 3
    first, second = op_out(WithTensor(torch.ones(1)), x, low=low, out=out)
    assert first is low
    assert second is out
    assert (low.item(), out.item()) == (3, 4)
    compiled = torch.compile(op_, fullgraph=True, backend="aot_eager")
    compiled(x, Frozen(2.0))
    assert x.item() == 6
