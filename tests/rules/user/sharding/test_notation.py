"""The notation of sharding rules. Uses private names."""

from __future__ import annotations

from typing import Any

import pytest

import torchop
from torchop._rules.user.sharding.notation import Operand, sharding


def test_a_rule_is_read() -> None:
    rule = sharding("b  k, [k n],. -> b n", whole="b", reduce={"k": "sum"}, linear=(0, ("w", 2)))
    assert rule.text == "b k, [k n],. -> b n"
    assert rule.arguments == (Operand(("b", "k")), Operand(("k", "n"), True), Operand((".",)))
    assert rule.results == (Operand(("b", "n")),)
    assert rule.whole == {"b"}
    assert rule.reduce == {"k": "sum"}
    assert rule.linear == ((0,), ("w", 2))
    assert torchop.sharding is sharding


def test_a_rule_shows_how_it_is_made() -> None:
    for made in (
        "torchop.sharding('... -> ...')",
        "torchop.sharding('b k, k -> b', reduce={'k': 'max'})",
        "torchop.sharding('a b -> a b', whole='a b', linear=((0,),))",
    ):
        rule = eval(made)
        assert repr(rule) == made
        assert rule == eval(made)
        assert hash(rule) == hash(eval(made))
    assert sharding("a -> a") != sharding("a -> a", whole="a")
    assert sharding("a -> a") != "a -> a"


@pytest.mark.parametrize(
    ("operand", "ndim", "width", "expected"),
    [
        (Operand(("a", "b")), 2, 3, ["a", "b"]),
        (Operand(("a", "b")), 1, 3, None),
        (Operand(()), 0, 2, []),
        (Operand(("...",)), 2, 3, ["...1", "...2"]),
        (Operand(("a", "...", "b")), 3, 1, ["a", "...0", "b"]),
        (Operand(("a", "...", "b")), 2, 1, ["a", "b"]),
        (Operand(("a", "...", "b")), 1, 1, None),
    ],
)
def test_dots_are_numbered_from_the_right(
    operand: Operand, ndim: int, width: int, expected: list[str] | None
) -> None:
    assert operand.dimensions(ndim, width) == expected


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no arrow": ("a, b", {}, r"'a, b' must have one '->'.*one operand for each tensor"),
    "two arrows": ("a -> b -> a", {}, "must have one '->'"),
    "no text": (3, {}, "must be a string, got 3 of type int"),
    "no name": ("a1 b-c -> a1", {}, "'b-c' is not the name of a dimension"),
    "a bracket inside": ("a [b] -> a", {}, r"'\[b\]' is not the name"),
    "not ASCII": ("ä -> ä", {}, "is not the name"),
    "twice": ("a a -> a", {}, "'a a' has 'a' twice"),
    "dots twice": ("... a ... -> a", {}, "has '...' twice"),
    "a result's own": ("a -> a z", {}, "only a result has the dimension 'z'.*write '.'"),
    "as einsum has it": ("bd,d->bd", {}, "single dimension 'bd'.*by spaces. Did you mean 'b d'"),
    "a result's, as einsum has it": ("ij,jk->ik", {}, "by spaces. Did you mean 'i k'"),
    "dots of a result": ("a -> a ...", {}, "only a result has the dimension '...'"),
    "whole unknown": ("a -> a", {"whole": "z"}, r"no dimension 'z', named by whole=.*has 'a'"),
    "whole no text": ("a -> a", {"whole": ["a"]}, r"whole= .* must be a string .* got \['a'\]"),
    "whole unnamed": ("a . -> a", {"whole": "."}, r"no dimension '\.'"),
    "reduce unknown": ("a -> a", {"reduce": {"z": "sum"}}, "no dimension 'z', named by reduce="),
    "reduce how": ("a b -> a", {"reduce": {"b": "mean"}}, "'mean'.*'avg', 'max', 'min', 'product'"),
    "reduce no dict": ("a b -> a", {"reduce": "b"}, "reduce= .* must be a dict .* got 'b'"),
    "reduce kept": ("a b -> a b", {"reduce": {"b": "sum"}}, "'b' is in every result"),
    "reduce and whole": ("a b -> a", {"reduce": {"b": "sum"}, "whole": "b"}, "in whole= and in"),
    "linear text": ("a -> a", {"linear": "x"}, "linear= .* must be a tuple .* got 'x'"),
    "linear bool": ("a -> a", {"linear": (True,)}, "linear= of .* takes numbers .* got True"),
}


@pytest.mark.parametrize(("text", "options", "message"), WRONG.values(), ids=WRONG)
def test_invalid_rule_is_rejected(text: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(torchop.ShardingRuleError, match=message):
        sharding(text, **options)
