"""All that is declared of one operator: what breaks it, and arguments that fulfil it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import constraints

import torchop
from torchop import CustomOp
from torchop._rules.user.preconditions import PRECONDITIONS
from torchop._rules.user.preconditions.base import Unfit
from torchop._rules.user.preconditions.declared import Preconditions
from torchop.preconditions import (
    Contiguous,
    Dtype,
    Indices,
    Lengths,
    Like,
    Offsets,
    OneOf,
    Shape,
    Sorted,
    Unique,
)


@pytest.fixture
def bags(namespace: str) -> CustomOp[..., Tensor]:
    @torchop.custom_op(f"{namespace}::bags", mutates_args=())
    def bags(
        table: Tensor,
        index: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        mode: str = "sum",
        rate: float = 0.5,
    ) -> Tensor:
        return table.clone()

    return bags


WHOLE: dict[str, Any] = {
    "table": Shape("rows", "columns", least=1),
    "index": (Shape("n"), Indices("table")),
    "offsets": (Shape("ends", least=2), Offsets("index")),
    "weights": (Like("index", "shape"), constraints.unit_interval),
    "mode": OneOf("sum", "mean"),
    "rate": constraints.unit_interval,
}


def valid(**changes: Any) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "table": torch.randn(5, 3),
        "index": torch.tensor([4, 0, 2]),
        "offsets": torch.tensor([0, 1, 3]),
        "weights": None,
        "mode": "sum",
        "rate": 0.5,
    }
    return {**arguments, **changes}


def declared(op: Any, value: Any) -> Preconditions:
    op.register_preconditions(value)
    return PRECONDITIONS.lookup(op)


def test_what_breaks_a_declaration_is_named(bags: Any) -> None:
    found = declared(bags, WHOLE)
    assert found.problem(valid()) is None
    for changes, problem in (
        ({"index": torch.tensor([5])}, "'index' is not valid, because its elements go from 5 to 5"),
        (
            {"offsets": torch.tensor([0, 2])},
            "'offsets' is not valid, because offsets must end",
        ),
        ({"weights": torch.ones(2)}, "'weights' is not valid, because its shape is"),
        ({"mode": "max"}, "'mode' is not valid, because 'max' is not one of ('sum', 'mean')"),
        ({"rate": 2.0}, "'rate' is not valid, because Interval"),
    ):
        assert (found.problem(valid(**changes)) or "").startswith(problem)


def test_sizes_of_one_name_are_equal(bags: Any) -> None:
    found = declared(bags, {"index": Shape("n"), "weights": Shape("n")})
    assert found.problem(valid(weights=torch.ones(3))) is None
    problem = "the size 'n' is 3 in 'index', but 2 in 'weights'"
    assert found.problem(valid(weights=torch.ones(2))) == problem


def test_functions_are_called_with_the_arguments_they_name(bags: Any) -> None:
    found = declared(bags, {"index": (Indices("table"), lambda index, mode: mode == "sum")})
    assert found.problem(valid()) is None
    problem = "'index' is not valid, because the function of index, mode returns False"
    assert found.problem(valid(mode="mean")) == problem
    found = declared(bags, {"index": lambda index: index.nothing})
    assert "raises AttributeError" in (found.problem(valid()) or "")


def test_arguments_are_fitted_to_each_other(bags: Any) -> None:
    found = declared(bags, WHOLE)
    before = valid(table=torch.randn(2, 3), weights=torch.tensor([2.0, 0.5, -1.0]), rate=7.0)
    made = found.fitted(before)
    assert made["index"].tolist() == [1, 0, 1]
    assert made["weights"].tolist() == [1.0, 0.5, 0.0]
    assert made["rate"] == 1.0
    assert made["table"] is before["table"]
    with pytest.raises(Unfit, match="the function of mode returns False"):
        declared(bags, {"mode": lambda mode: False}).fitted(valid())


def test_lists_of_numbers_and_of_tensors(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::lists", mutates_args=())
    def lists(tensors: list[Tensor], places: list[int]) -> Tensor:
        return tensors[0].clone()

    found = declared(
        lists, {"tensors": Dtype(torch.half), "places": (Indices("tensors"), Unique(), Sorted())}
    )
    arguments = {"tensors": [torch.ones(1), torch.ones(2).half()], "places": [1, 1]}
    assert "'tensors' is not valid, because its dtype is" in (found.problem(arguments) or "")
    made = found.fitted(arguments)
    assert [t.dtype for t in made["tensors"]] == [torch.half, torch.half]
    assert made["places"] == [0, 1]


def test_limits_are_valid_and_each_is_reached(bags: Any) -> None:
    found = declared(bags, WHOLE)
    made = list(found.limits(valid(weights=torch.tensor([0.5, 0.5, 0.5]))))
    assert all(found.problem(arguments) is None for _, arguments in made)
    assert {arguments["mode"] for _, arguments in made} == {"sum", "mean"}
    assert {arguments["rate"] for _, arguments in made} >= {0.0, 1.0}
    assert {len(arguments["index"]) for _, arguments in made} >= {0, 1}
    assert min(len(arguments["table"]) for _, arguments in made) == 1
    assert [0, 3, 3] in [arguments["offsets"].tolist() for _, arguments in made]
    labels = [label for label, _ in made]
    assert "n = 0" in labels
    assert "weights at a limit of Interval(lower_bound=0.0, upper_bound=1.0)" in labels


def test_examples_are_made_of_a_declaration_that_is_enough(bags: Any) -> None:
    bags.register_preconditions(WHOLE)
    made = bags.examples()
    assert [kwargs["mode"] for _, kwargs in made] == ["sum", "mean"]
    for args, kwargs in made:
        assert PRECONDITIONS.lookup(bags).problem(kwargs) is None
        bags(*args, **kwargs)
    made[0][1]["table"].zero_()
    assert bool(bags.examples()[0][1]["table"].all())
    bags.register_examples(lambda: [tuple(valid().values())])
    assert len(bags.examples()) == 1


def test_sizes_that_are_arguments_too(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::one_hot", mutates_args=())
    def one_hot(classes: Tensor, weights: Tensor, count: int) -> Tensor:
        return torch.nn.functional.one_hot(classes, count) * weights

    one_hot.register_preconditions(
        {"classes": (Shape("n"), Indices("count")), "weights": Shape("count", least=1)}
    )
    ((_, kwargs),) = one_hot.examples()
    assert len(kwargs["weights"]) == kwargs["count"] > int(kwargs["classes"].max())
    assert one_hot(**kwargs).shape[1] == kwargs["count"]


def test_a_size_that_is_an_argument_with_a_default(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::grouped", mutates_args=())
    def grouped(x: Tensor, groups: int = 1) -> Tensor:
        return x.view(groups, -1).sum(1)

    grouped.register_preconditions({"x": Shape("groups", 2, least=1), "groups": OneOf(4, 2)})
    calls = [kwargs for _, kwargs in grouped.examples()]
    assert [(k["groups"], len(k["x"])) for k in calls] == [(4, 4), (2, 2)]
    preconditions = PRECONDITIONS.lookup(grouped)
    made = preconditions.fitted({"x": torch.ones(2, 2), "groups": 4})
    assert (made["groups"], len(made["x"])) == (2, 2)


def test_numbers_keep_the_precision_of_python(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::scaled", mutates_args=())
    def scaled(x: Tensor, by: float = 0.1, all_by: list[float] = (0.1, 0.7)) -> Tensor:
        return x * by

    rate = constraints.interval(0.0, 0.7)
    scaled.register_preconditions({"x": Shape("n"), "by": rate, "all_by": rate})
    made = PRECONDITIONS.lookup(scaled).fitted({"x": torch.ones(2), "by": 3.0, "all_by": [0.1, 3]})
    assert (made["by"], made["all_by"]) == (0.7, [0.1, 0.7])


def test_a_value_for_which_there_is_no_example_is_left_out(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::rows", mutates_args=())
    def rows(x: Tensor, k: int) -> Tensor:
        return x.clone()

    rows.register_preconditions({"x": Shape("k", 2), "k": OneOf(0, 5)})
    assert [kwargs["k"] for _, kwargs in rows.examples()] == [0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((Shape(10**12),), r"an example of shape \[1000000000000\] has .*, or would be too large"),
        ((Shape("m", least=2), Dtype(torch.int8), Indices("x")), None),
        ((Shape("m", least=2), Dtype(torch.uint8), Offsets("x")), "has no value of 'y'"),
        ((Shape("k"), Dtype(torch.int8)), "has a negative size, or would be too large"),
        ((Shape("m"), Dtype(torch.quint8)), r"no tensor of torch.quint8 can be made"),
        ((Shape("m"), Dtype(torch.complex64), constraints.positive), "does not hold"),
        ((Shape("m"), Dtype(torch.float8_e4m3fn), constraints.unit_interval), None),
        ((Shape("m"), Dtype(torch.float8_e4m3fn), constraints.positive), None),
    ],
)
def test_dtypes_that_hold_few_numbers(namespace: str, words: Any, said: str | None) -> None:
    @torchop.custom_op(f"{namespace}::pair", mutates_args=())
    def pair(x: Tensor, y: Tensor, k: int = -3) -> Tensor:
        return x.clone()

    pair.register_preconditions({"x": Shape("r", least=300), "y": words, "k": OneOf(-3)})
    if said is not None:
        with pytest.raises(torchop.MissingRuleError, match=said):
            pair.examples()
        return
    preconditions = PRECONDITIONS.lookup(pair)
    for _, kwargs in pair.examples():
        assert preconditions.problem(kwargs) is None
        for _, limit in preconditions.limits(kwargs):
            assert preconditions.problem(limit) is None


@pytest.mark.parametrize(
    ("word", "values"),
    [
        (Shape, (-1, "n")),
        (Shape, (True,)),
        (Indices, ("x", "0")),
        (Indices, (["x"],)),
        (Lengths, (None,)),
    ],
)
def test_words_refuse_what_they_do_not_mean(word: Any, values: Any) -> None:
    with pytest.raises(ValueError, match=rf"{word.__name__}\(.*\) takes "):
        word(*values)


def test_a_declaration_that_is_not_enough_says_so(bags: Any) -> None:
    bags.register_preconditions({"table": Contiguous()})
    with pytest.raises(
        torchop.MissingRuleError,
        match=r"has no examples\. Its preconditions are not enough to make some: the shape of "
        "'table' is not declared; add a Shape",
    ):
        bags.examples()


def test_texts_are_what_is_shown(bags: Any) -> None:
    def documented(rate: float) -> bool:
        """Rates that are no multiple of three."""
        return rate % 3 != 0

    found = declared(bags, {"index": Indices("table"), "rate": (constraints.positive, documented)})
    assert found.texts() == {
        "index": "Indices(of='table', dim=0, least=0)",
        "rate": "GreaterThan(lower_bound=0.0); Rates that are no multiple of three.",
    }


def test_lengths_of_a_list(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::split", mutates_args=())
    def split(x: Tensor, lengths: list[int]) -> Tensor:
        return x.clone()

    found = declared(split, {"lengths": Lengths("x")})
    assert found.fitted({"x": torch.ones(5), "lengths": [4, 4]})["lengths"] == [4, 1]
