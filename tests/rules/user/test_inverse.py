from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from torchop import CustomOp, MissingRuleError

VALUES = {"inverse": lambda output: output, "right_inverse": lambda output: output}


@pytest.fixture
def scale(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::scale", mutates_args=())
    def scale(x: Tensor, factor: float = 2.0, *, negate: bool = False) -> Tensor:
        return x * (-factor if negate else factor)

    scale.register_fake(lambda x, factor, negate: torch.empty_like(x))
    scale.register_autograd(
        lambda ctx, grad: (grad * ctx.factor, None),
        setup_context=lambda ctx, inputs, keyword_only_inputs, output: setattr(
            ctx, "factor", -inputs[1] if keyword_only_inputs["negate"] else inputs[1]
        ),
    )
    scale.register_vmap(
        lambda info, in_dims, x, factor, *, negate: (scale(x, factor, negate=negate), in_dims[0])
    )

    @scale.register_inverse
    def unscale(output: Tensor, factor: float, *, negate: bool) -> Tensor:
        return scale(output, 1 / factor, negate=negate)

    return scale


@pytest.fixture
def shift(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::shift", mutates_args=())
    def shift(x: Tensor, by: float) -> Tensor:
        return x + by

    shift.register_fake(lambda x, by: torch.empty_like(x))
    shift.register_inverse(lambda output, by: shift(output, -by))
    return shift


X = torch.tensor([1.0, 2.0])


# --------------------------------------------------------------------------------------------------
# One operator


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((4.0,), {}),
        ((), {"factor": 4.0}),
        ((4.0,), {"negate": True}),
        ((), {"negate": True, "factor": 8.0}),
    ],
)
def test_an_inverse_takes_the_other_arguments_as_they_were(
    scale: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    output = scale(X, *args, **kwargs)
    assert not torch.equal(output, X)
    assert torch.equal(torchop.inverse(scale)(output, *args, **kwargs), X)


def test_an_operator_is_named_in_any_way(scale: Any) -> None:
    for op in (scale, scale.name, scale.overload, scale.overload._overloadpacket):
        assert torch.equal(torchop.inverse(op)(2 * X), X)


def test_an_operator_of_another_library(namespace: str) -> None:
    torchop.define(f"{namespace}::shift", "(Tensor x, int by=1) -> Tensor")
    torchop.get_rule("inverse").register(f"{namespace}::shift", lambda output, by: output - by)
    undo = torchop.inverse(getattr(torch.ops, namespace).shift)
    assert torch.equal(undo(X), X - 1)
    assert torch.equal(undo(X, by=2), X - 2)


def test_arguments_that_are_missing_or_too_many(scale: Any, shift: Any) -> None:
    with pytest.raises(TypeError, match=r"an inverse of .*::shift is missing the argument 'by'"):
        torchop.inverse(shift)(X)
    with pytest.raises(TypeError, match="positional argument"):
        torchop.inverse(shift)(X, 1.0, 2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'to'"):
        torchop.inverse(scale)(X, to=1.0)


def test_last_registration_applies(shift: Any) -> None:
    before = torchop.inverse(shift)
    shift.register_inverse(lambda output, by: output * 0)
    assert torch.equal(torchop.inverse(shift)(X, 1.0), torch.zeros(2))
    assert torch.equal(before(X, 1.0), X - 1), "it is what was registered when it was asked for"


def test_right_inverse_is_not_an_inverse(namespace: str) -> None:
    @torchop.operator(f"{namespace}::first")
    class first:
        @staticmethod
        def forward(x: Tensor, count: int = 1) -> Tensor:
            return x[:count].clone()

        @staticmethod
        def right_inverse(output: Tensor, count: int) -> Tensor:
            return torch.cat([output, torch.zeros(3)])

    output = torch.tensor([5.0])
    assert torch.equal(first(torchop.right_inverse(first)(output)), output)
    with pytest.raises(
        MissingRuleError,
        match=r"::first has no inverse\. It has a right inverse, called by "
        r"torchop\.right_inverse\(op\)\. Register one: op\.register_inverse\(fn\)",
    ):
        torchop.inverse(first)


def test_missing_inverse_raises(namespace: str, scale: Any) -> None:
    with pytest.raises(
        MissingRuleError, match=r"aten::relu has no inverse\. .*\.register\('aten::relu', fn\)"
    ):
        torchop.inverse("aten::relu")
    with pytest.raises(MissingRuleError, match=r"no right inverse\. It has an inverse, called by"):
        torchop.right_inverse(scale)
    with pytest.raises(torchop.OperatorNotFoundError):
        torchop.inverse(f"{namespace}::nothing")
    assert issubclass(MissingRuleError, NotImplementedError)


# --------------------------------------------------------------------------------------------------
# Several operators


def test_a_sequence_is_undone_from_the_last_to_the_first(scale: Any, shift: Any) -> None:
    steps = [scale, functools.partial(shift, by=3.0), scale.name]
    output = scale(shift(scale(X), 3.0))
    assert torch.equal(torchop.inverse(steps)(output), X)
    assert torch.equal(torchop.inverse(tuple(steps[1:]))(output), scale(X))
    assert torch.equal(torchop.inverse([])(X), X), "nothing is undone by nothing"


def test_partial_is_undone_with_its_bound_arguments(shift: Any) -> None:
    partial = functools.partial(shift, by=3.0)
    assert torch.equal(torchop.inverse(partial)(partial(X)), X)
    assert torch.equal(torchop.inverse(functools.partial(partial, by=1.0))(X), X - 1)
    with pytest.raises(torchop.RuleSignatureError, match="bind all arguments by keyword"):
        torchop.inverse(functools.partial(shift, X))


def test_operators_that_cannot_be_composed_are_rejected(
    namespace: str, scale: Any, shift: Any
) -> None:
    with pytest.raises(
        torchop.RuleSignatureError,
        match=r"::shift: the argument 'by' has no value in a sequence.*partial\(op, by=\.\.\.\)",
    ):
        torchop.inverse([scale, shift])

    @torchop.operator(f"{namespace}::halves")
    class halves:
        @staticmethod
        def forward(x: Tensor) -> tuple[Tensor, Tensor]:
            return x[:1].clone(), x[1:].clone()

        @staticmethod
        def inverse(output: tuple[Tensor, Tensor]) -> Tensor:
            return torch.cat(output)

    assert torch.equal(torchop.inverse(halves)(halves(X)), X)
    with pytest.raises(torchop.RuleSignatureError, match=r"::halves has 2 results.*on it alone"):
        torchop.inverse([halves])


# --------------------------------------------------------------------------------------------------
# Registration


def test_an_inverse_takes_the_output_and_the_rest(shift: Any, namespace: str) -> None:
    with pytest.raises(
        torchop.RuleSignatureError, match=r"an inverse is called with \(output, by\)"
    ):
        shift.register_inverse(lambda output: output)
    with pytest.raises(torchop.RuleSignatureError, match="a right inverse must be a function"):
        shift.register_right_inverse(3)


@pytest.mark.parametrize("schema", ["() -> Tensor", "(Tensor x) -> ()", "(*, int n) -> Tensor"])
def test_undoing_nothing_raises(namespace: str, schema: str) -> None:
    torchop.define(f"{namespace}::op", schema)
    with pytest.raises(torchop.SchemaError, match=r"so the operator must have both\. Got "):
        torchop.get_rule("inverse").register(f"{namespace}::op", lambda *args: None)


# --------------------------------------------------------------------------------------------------
# Inverses under modes, transforms and compilers


def test_inside_a_compiled_function(scale: Any, shift: Any) -> None:
    by = functools.partial(shift, by=3.0)
    prepared = torchop.inverse([scale, by])

    def inside(x: Tensor) -> Tensor:
        undo = torchop.inverse([scale, by])
        return undo(x) + torchop.inverse(scale)(x, negate=True) + prepared(x)

    compiled = torch.compile(inside, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(X), inside(X))
    shift.register_inverse(lambda output, by: output * 0)
    assert torch.equal(compiled(X), inside(X)), "a new registration is compiled anew"
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="has no right inverse"):
        torch.compile(lambda x: torchop.right_inverse(scale)(x), fullgraph=True, backend="eager")(X)
