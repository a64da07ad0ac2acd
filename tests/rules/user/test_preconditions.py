"""Preconditions: what a caller may pass, which an operator carries with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

import torchop
from torchop import CustomOp
from torchop.preconditions import Dtype, Indices, Like, OneOf, Shape

VALUES = {"preconditions": {"x": constraints.unit_interval}}


@pytest.fixture
def take(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::take", mutates_args=())
    def take(table: Tensor, index: Tensor, mode: str = "sum", rate: float = 1.0) -> Tensor:
        return table[index]

    return take


async def _waits(table: Tensor) -> bool:
    return False


@pytest.mark.parametrize(
    ("declared", "error", "message"),
    [
        (
            {"indx": Indices("table")},
            TypeError,
            r"::take: the preconditions: the operator has no argument 'indx' \(did you mean "
            r"'index'\?\)\. It takes table, index, mode, rate\.",
        ),
        (
            {"index": Indices("tabel")},
            TypeError,
            r"the precondition Indices\(of='tabel'.* of 'index': the operator has no argument "
            r"'tabel' \(did you mean 'table'\?\)",
        ),
        (
            {"index": lambda index, tables: True},
            TypeError,
            r"of 'index': the operator has no argument 'tables' \(did you mean 'table'\?\)",
        ),
        ({"index": Indices("index")}, TypeError, "relates the argument to itself"),
        ({"index": Like("rate")}, TypeError, "of 'index': 'rate' is of type float"),
        (
            {"index": 3.5},
            TypeError,
            r"the precondition 3\.5 of 'index' is not one: use",
        ),
        ({"rate": constraints.interval}, TypeError, "of 'rate' is not one: use a constraint"),
        (
            {"mode": constraints.unit_interval},
            TypeError,
            "it is for tensors and numbers, but the argument is of type str",
        ),
        (
            {"rate": Shape("n")},
            TypeError,
            "it is for tensors, but the argument is of type float",
        ),
        (
            {"rate": constraints.interval(1, 0)},
            ValueError,
            r"the preconditions of 'rate' contradict each other, because no number is at least ",
        ),
        (
            {"table": (constraints.greater_than(1.0), constraints.less_than(0.5))},
            ValueError,
            r"of 'table' contradict each other, because no number is at least 1\.0.* at most 0\.4",
        ),
        (
            {"table": (Shape("n", 3), Shape("m", 4))},
            ValueError,
            r"'table' contradict each other, because no tensor has the shapes Shape\(dims=\('n', 3",
        ),
        (
            {"table": (Shape("n"), Shape("n", "m"))},
            ValueError,
            "'table' contradict each other, because no tensor has the shapes",
        ),
        (
            {"mode": OneOf("sum", 3)},
            TypeError,
            "the argument is of type str, which 3 is not",
        ),
        (
            {"rate": OneOf("fast")},
            TypeError,
            "the argument is of type float, which 'fast' is not",
        ),
        ({"table": OneOf(1)}, TypeError, "the argument is of type Tensor, which 1 is not"),
        ([Indices("table")], TypeError, "preconditions are a dict that says by the name of an"),
        (
            {"index": Indices("mode")},
            TypeError,
            "it is about a tensor, a list or an int, and 'mode' is of type str",
        ),
        (
            {"rate": constraints.interval(float("nan"), 1.0)},
            TypeError,
            "has the bound nan, which is no number that a tensor holds",
        ),
        (
            {"table": constraints.integer_interval(0, 2**70)},
            TypeError,
            "has the bound 1180591620717411303424, which is no number that a tensor holds",
        ),
        (
            {"table": constraints.interval("a", "b")},
            TypeError,
            "has the bound 'a', which is no number that a tensor holds",
        ),
        (
            {"table": (Dtype(torch.half), Dtype(torch.int64, torch.double))},
            ValueError,
            "contradict each other, because .*torch.float16.* have nothing in common",
        ),
        (
            {"mode": (OneOf("sum"), OneOf("mean", "max"))},
            ValueError,
            "contradict each other, because .*'sum'.*'mean', 'max'.* have nothing in common",
        ),
        (
            {"index": (Indices("table"), Dtype(torch.int32, torch.double))},
            ValueError,
            r"because Indices\(of='table', dim=0, least=0\) is about integers, and torch.float64",
        ),
        (
            {"table": constraints.interval(torch.zeros(2), torch.ones(2))},
            TypeError,
            "depends on tensors that are not there: give it bounds that are numbers",
        ),
        ({"table": constraints.dependent}, TypeError, "depends on tensors that are not there"),
        ({"table": eval("lambda table, /: True")}, TypeError, "names of arguments, without "),
        ({"table": lambda *table: True}, TypeError, "names of arguments, without "),
        ({"table": _waits}, TypeError, "not a function that returns a bool"),
    ],
)
def test_wrong_declarations_are_refused(
    take: Any, declared: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        take.register_preconditions(declared)
    assert not torchop.get_rule("preconditions").has(take)


def test_an_example_that_breaks_them_is_refused(take: Any) -> None:
    take.register_preconditions({"index": Indices("table"), "mode": OneOf("sum", "mean")})
    table = torch.ones(3, 2)
    take.register_examples(
        lambda: [(table, torch.tensor([2])), {"table": table, "index": torch.tensor([3])}]
    )
    with pytest.raises(
        ValueError,
        match=r"::take: example 1 breaks the preconditions: 'index' is not valid, because its "
        r"elements go from 3 to 3, .* Change it, or what register_preconditions says\.",
    ):
        take.examples()


def test_without_preconditions(take: Any) -> None:
    with pytest.raises(torchop.MissingRuleError, match=r"::take has no preconditions\. Say what a"):
        torchop.get_rule("preconditions").lookup(take)


def test_forms_have_those_of_their_operator(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::root", mutates_args=())
    def root(x: Tensor) -> Tensor:
        return x.sqrt()

    root.register_fake(torch.empty_like)
    root.register_preconditions({"x": constraints.nonnegative})
    rule = torchop.get_rule("preconditions")
    assert rule.lookup(root.derive_inplace()) is rule.lookup(root)
    assert rule.lookup(root.derive_out()) is rule.lookup(root)


def test_it_is_a_member_of_classes(namespace: str) -> None:
    @torchop.operator(f"{namespace}::log")
    class log:
        schema = "(Tensor x) -> Tensor"
        preconditions = {"x": (Shape("n"), constraints.positive)}  # noqa: RUF012

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.log()

    ((_, kwargs),) = log.examples()
    assert bool((kwargs["x"] > 0).all())
