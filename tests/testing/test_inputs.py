"""inputs: what it draws is valid, reaches the limits, and shrinks to something small."""

from __future__ import annotations

import re
import sys
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import constraints

import torchop
from tests.strategies import manifold, stable
from torchop.preconditions import (
    Dtype,
    Indices,
    Lengths,
    Like,
    Offsets,
    OneOf,
    Shape,
    Unique,
)
from torchop.testing import inputs
from torchop.testing._extras import installing

# The same in every run, and without what earlier runs found.
SEARCH = settings(stable, max_examples=1000, database=None, phases=(Phase.generate, Phase.shrink))
MATRIX = Shape("rows", "columns", least=1)
DECLARED: dict[str, dict[str, Any]] = {
    "bags": {
        "x": Shape("rows", 2),
        "y": (Shape("n"), Indices("x")),
        "z": (Shape("ends", least=2), Offsets("y")),
        "rate": constraints.unit_interval,
        "mode": OneOf("sum", "mean"),
    },
    "integers": {
        "x": (MATRIX, Dtype(torch.int8, torch.uint8, torch.bool)),
        "y": (Shape("rows"), Indices("x"), Unique()),
        "z": (Shape("parts", least=1), Lengths("x", dim=1)),
    },
    "matrices": {
        "x": (Shape("n", "n", least=1), constraints.positive_definite),
        "y": (Shape("n"), constraints.half_open_interval(0, 1), Dtype(torch.half, torch.double)),
        "z": (Like("y"), constraints.positive),
        "rate": constraints.less_than(1.0),
    },
    "functions": {
        "x": (Shape("rows", 2), lambda x: len(x) % 2 == 0, Dtype(torch.cfloat)),
        "y": (Shape("rows"), constraints.greater_than(300.0), lambda y: y.sum() != 1),
        "z": (Shape("n"), constraints.integer_interval(-1, 7)),
    },
}


def define(namespace: str, declared: dict[str, Any]) -> Any:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(
        x: Tensor, y: Tensor, z: Tensor, rate: float = 0.5, mode: str = "sum", count: int = 3
    ) -> Tensor:
        return x.clone()

    op.register_preconditions(declared)
    return op


@pytest.mark.parametrize("name", DECLARED)
def test_every_call_is_valid(namespace: str, name: str) -> None:
    op = define(namespace, DECLARED[name])
    if name == "functions":
        x, y = torch.ones(4, 2, dtype=torch.cfloat), torch.full((4,), 301.0)
        op.register_examples(lambda: [(x, y, torch.ones(2))])
    found = torchop.get_rule("preconditions").lookup(op)
    shapes, values = set(), set()

    @manifold
    @given(inputs(op))
    def check(call: Any) -> None:
        args, kwargs = call
        op(*args, **kwargs)
        arguments = found.arguments(args, kwargs)
        assert found.problem(arguments) is None
        tensors = [arguments[each] for each in "xyz"]
        shapes.add(tuple(tensor.shape for tensor in tensors))
        values.add(str(tensors))

    check()
    assert len(shapes) >= 5
    assert len(values) >= 50


def shrunk(op: Any, fails: Any) -> dict[str, Any]:
    args, kwargs = find(inputs(op), lambda call: fails(**bound(op, call)), settings=SEARCH)
    return bound(op, (args, kwargs))


def bound(op: Any, call: Any) -> dict[str, Any]:
    return dict(torchop.get_rule("preconditions").lookup(op).arguments(*call))


def test_it_shrinks_to_small_sizes_and_simple_numbers(namespace: str) -> None:
    op = define(namespace, {"x": Shape("rows", "columns"), "y": Like("x"), "z": Like("x")})
    smallest = shrunk(op, lambda x, **_: True)
    assert smallest["x"].shape == smallest["z"].shape == (0, 0)
    found = shrunk(op, lambda x, **_: len(x) >= 3 and bool((x < 0).any()))
    assert found["x"].shape == (3, 1)
    assert found["x"].unique().tolist() in ([-1.0], [-1.0, 0.0])
    assert found["y"].tolist() == [[0.0]] * 3


def test_it_reaches_what_examples_lack(namespace: str) -> None:
    op = define(
        namespace,
        {
            "x": Shape("rows", 2),
            "y": (Shape("n"), Indices("x")),
            "z": (Shape("ends", least=2), Offsets("y")),
            "mode": OneOf("sum", "mean"),
            "count": constraints.integer_interval(2, 9),
        },
    )
    found = shrunk(op, lambda x, y, z, **_: len(x) == 0)  # which needs that there are no indices
    assert (len(found["y"]), found["z"].tolist()) == (0, [0, 0])
    assert found["mode"] == "sum"
    found = shrunk(
        op, lambda x, y, mode, count, **_: mode == "mean" and count == 9 and 2 in y.tolist()
    )
    assert (found["x"].shape, found["y"].tolist()) == ((3, 2), [2])


def test_numbers_reach_the_ends_of_a_range(namespace: str) -> None:
    op = define(namespace, {**dict.fromkeys("xyz", Shape("n"))})
    op.register_preconditions(
        {"x": (Shape("n"), constraints.unit_interval), "rate": constraints.nonnegative}
    )
    x = torch.full((3,), 0.5, requires_grad=True)
    op.register_examples(lambda: [(x, x, x, 1.0)])
    for end in (0.0, 1.0):
        found = shrunk(op, lambda x, end=end, **_: end in x.tolist())
        assert found["x"].tolist() == [end]
        assert found["x"].requires_grad
        assert found["x"].is_leaf
    # Of `y`, nothing is declared.
    assert torch.equal(found["y"], x)


def test_without_preconditions_there_are_examples(namespace: str) -> None:
    @torchop.custom_op(f"{namespace}::clear", mutates_args=("x",))
    def clear(x: Tensor) -> None:
        x.zero_()

    clear.register_examples(lambda: [(torch.ones(2),), {"x": torch.ones(3)}])
    seen = set()

    @stable
    @given(inputs(f"{namespace}::clear"), st.booleans())
    def check(call: Any, _: bool) -> None:
        args, kwargs = call
        (x,) = args or kwargs.values()
        assert bool((x == 1).all())  # each call has tensors of its own
        seen.add((len(args), len(x)))
        clear(*args, **kwargs)

    check()
    assert seen == {(1, 2), (0, 3)}


def test_too_little_is_declared(namespace: str) -> None:
    op = define(namespace, {"x": Shape("rows")})
    with pytest.raises(
        torchop.MissingRuleError,
        match=r"::op has no examples\. Its preconditions are not enough to make some: .*'y'",
    ):
        inputs(op)
    op.register_examples(list)
    with pytest.raises(
        torchop.MissingRuleError,
        match=r"::op has no examples, because the function of register_examples yields none\. ",
    ):
        inputs(op)


def test_without_hypothesis_it_says_what_to_install(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    message = f"torchop.testing.inputs needs hypothesis: {installing('test')}"
    with pytest.raises(ModuleNotFoundError, match=re.escape(message)):
        inputs(define(namespace, {}))
