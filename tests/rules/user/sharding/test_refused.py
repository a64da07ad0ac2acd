"""Errors about invalid sharding rules, and about calls that a rule does not support.

Uses private names.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torchop
from tests.rules.user.sharding.operators import X, add, sine
from tests.rules.user.sharding.ranks import assert_right, on_mesh, words
from torchop._rules.user.sharding import SHARDING


def test_an_operator_without_a_rule(namespace: str, mesh: Any) -> None:
    op = add(namespace)
    x = on_mesh(mesh, X, "S0")
    expected = (
        rf"^{namespace}::op has no sharding rule.*sharding\('{namespace}::op', 'pointwise'\)"
        rf".*such as 'b k, k n -> b n'.*{namespace}::op\(Tensor x, Tensor y\) -> Tensor.*local_map"
    )
    for call in (op, getattr(torch.ops, namespace).op):
        with pytest.raises(NotImplementedError, match=expected) as caught:
            call(x, x)
        assert type(caught.value) is torchop.MissingRuleError
    with pytest.raises(torchop.MissingRuleError, match=expected):
        torchop.get_rule("sharding").lookup(op)
    op.register_sharding("pointwise")
    assert_right(op(x, x), X * 2, "S0")


def test_errors_of_other_operators_are_unchanged(namespace: str, mesh: Any) -> None:
    stock = torch.library.custom_op(
        f"{namespace}::stock", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    stock.register_fake(torch.empty_like)
    x = on_mesh(mesh, X, "S0")
    with pytest.raises(
        NotImplementedError, match=r"^Operator .* does not have a sharding strategy"
    ):
        stock(x)
    torchop.register_sharding(stock, "pointwise")
    assert_right(stock(x), X.sin(), "S0")


def test_a_strategy_that_was_there_comes_back(namespace: str, mesh: Any) -> None:
    x = on_mesh(mesh, X, "S0")
    with torchop.Library("aten", "FRAGMENT") as library:
        torchop.register_sharding("aten::sin", "replicate", lib=library)
        assert words(x.sin()) == "R"
    assert words(x.sin()) == "S0"


def test_plain_tensors_among_dtensors(namespace: str, mesh: Any) -> None:
    op = add(namespace)
    op.register_sharding("pointwise")
    expected = rf"^{namespace}::op: the call mixes DTensors.*distribute_tensor\("
    with pytest.raises(torchop.ArgumentError, match=expected):
        op(on_mesh(mesh, X, "S0"), X)


WRONG: dict[str, tuple[str, Any, dict[str, Any], str]] = {
    "arguments": (
        "(Tensor x, Tensor w) -> Tensor",
        "a -> a",
        {},
        r"1 operand before .* 2 tensors \(x, w\)\. If in doubt, write 'replicate'",
    ),
    "results": (
        "(Tensor x) -> Tensor",
        "a -> a, a",
        {},
        "2 operands after '->', but the operator returns 1 tensor",
    ),
    "a list": (
        "(Tensor[] xs) -> Tensor",
        "a -> a",
        {},
        r"xs is a list .* in \[brackets\]\. If in doubt, write 'replicate'",
    ),
    "no list": (
        "(Tensor x) -> Tensor",
        "[a] -> a",
        {},
        r"x is one tensor, so the operand must not be in",
    ),
    "a list result": ("(Tensor x) -> Tensor[]", "a -> a", {}, "result 0 is a list of tensors"),
    "no tensors": ("(int x) -> Tensor", "-> a", {}, "needs an operator that takes tensors"),
    "no text": (
        "(Tensor x) -> Tensor",
        3.5,
        {},
        r"must be a string such as 'b k, k n -> b n', one of 'pointwise'.*got 3\.5",
    ),
    "no notation": (
        "(Tensor x) -> Tensor",
        "a",
        {},
        r"must have one '->'.*If in doubt, write 'replicate'.*Got .*Tensor x",
    ),
    "a preset with a slip of the pen": (
        "(Tensor x) -> Tensor",
        "pointwize",
        {},
        r"must have one '->'.*'pointwise', 'replicate', 'batch' are rules too\. If in doubt",
    ),
    "a word's options": (
        "(Tensor x) -> Tensor",
        "pointwise",
        {"whole": "a"},
        "options of a rule that is a string. 'pointwise' takes",
    ),
    "a function's options": (
        "(Tensor x) -> Tensor",
        lambda x: "",
        {"whole": "a"},
        "A function that chooses the rule returns",
    ),
    "reduce into written": (
        "(Tensor(a!) y, Tensor x) -> ()",
        "a, a k -> ",
        {"reduce": {"k": "sum"}},
        "reduces 'k', but the written argument 'y' lacks",
    ),
    "linear unknown": (
        "(Tensor x) -> Tensor",
        "a -> a",
        {"linear": ("z",)},
        "'a -> a': linear= names 'z'.* from 0 to 0, or their names: x",
    ),
    "linear number": ("(Tensor x) -> Tensor", "a -> a", {"linear": (1,)}, "linear= names 1"),
    "linear written": (
        "(Tensor(a!) y, Tensor x) -> ()",
        "a, a -> ",
        {"linear": (1,)},
        "has x without the written arguments y",
    ),
    "unhashed text": (
        "(Tensor x, float lr) -> Tensor",
        "a -> a",
        {"unhashed": "lr"},
        "tuple of argument names",
    ),
    "unhashed tensor": (
        "(Tensor x) -> Tensor",
        "a -> a",
        {"unhashed": ("x",)},
        "must name arguments that are not tensors, got 'x'",
    ),
    "unhashed behind": (
        "(Tensor x, int n, float lr) -> Tensor",
        "a -> a",
        {"unhashed": ("lr",)},
        "unhashed= cannot name 'lr'.* from 'n' on. Make it keyword-only",
    ),
    "unhashed number": (
        "(Tensor x) -> Tensor",
        "a -> a",
        {"unhashed": ([],)},
        r"must name arguments that are not tensors, got \[\]",
    ),
    "a whole that is no text": (
        "(Tensor x) -> Tensor",
        "a -> a",
        {"whole": X},
        "must be a string with",
    ),
    "a reduction that is no text": (
        "(Tensor x) -> Tensor",
        "a b -> a",
        {"reduce": {"b": X}},
        r"reduce={'b': tensor\(.*must be one of 'avg', 'max'",
    ),
    "keyword list": (
        "(Tensor x, *, Tensor[] w) -> Tensor",
        "a, [a] -> a",
        {},
        "lists of tensors that are passed by keyword, such as 'w'",
    ),
    "a list of several": (
        "(Tensor x) -> (Tensor[], Tensor)",
        "a -> [a], a",
        {},
        "does not support a list of tensors alongside other results",
    ),
}


@pytest.mark.parametrize(("schema", "rule", "options", "message"), WRONG.values(), ids=WRONG)
def test_a_rule_is_checked_when_it_is_registered(
    namespace: str, schema: str, rule: Any, options: dict[str, Any], message: str
) -> None:
    torchop.define(f"{namespace}::op", schema)
    with pytest.raises(torchop.ShardingRuleError, match=f"^{namespace}::op: .*{message}"):
        torchop.register_sharding(f"{namespace}::op", rule, **options)
    assert not SHARDING.has(f"{namespace}::op")


def test_a_function_that_raises(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding(lambda x: x.placements)
    expected = (
        rf"^{namespace}::op: the function that chooses the sharding rule raised AttributeError: .*"
        "'placements'.*objects that have shape, stride, dtype and ndim in place of tensors"
    )
    with pytest.raises(torchop.ShardingError, match=expected) as caught:
        op(on_mesh(mesh, X, "S0"))
    assert isinstance(caught.value.__cause__, AttributeError)
    op.register_sharding("pointwise")
    assert words(op(on_mesh(mesh, X, "S0"))) == "S0"
