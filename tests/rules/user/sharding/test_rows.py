"""A call raises if the shapes of its tensors do not fit the sharding rule. Uses private names."""

from __future__ import annotations

from typing import Any

import pytest

import torchop
from torchop._rules.user.sharding.notation import sharding
from torchop._rules.user.sharding.rows import CallTensor, rows

WRONG: dict[str, tuple[str, list[Any], list[Any], str]] = {
    "dimensions": ("a b -> a b", [(4,)], [(4,)], r"'a b' of .* argument 0, which has 1 dim"),
    "as in einsum": ("ab -> ab", [(4, 2)], [(4, 2)], r"by spaces. Did you mean 'a b'\?"),
    "result": ("a -> a", [(4,)], [(4, 1)], "does not fit result 0, which has 2 dimensions"),
    "results": ("a -> a", [(4,)], [(4,), (4,)], "has 1 operands after .* returned 2"),
    "doubled": ("a -> a", [(4,)], [(8,)], "result 0 of shape .8. has 8, others have 4"),
    "inputs": ("a, a -> a", [(4,), (5,)], [(4,)], "'a', for dimensions of different size"),
    "dots": ("... -> ...", [(4, 6)], [(4,)], r"'\.\.\.', for dimensions of different size"),
}


@pytest.mark.parametrize(("text", "shapes", "results", "message"), WRONG.values(), ids=WRONG)
def test_shapes_that_contradict_a_rule_are_refused(
    text: str, shapes: list[Any], results: list[Any], message: str
) -> None:
    tensors = [CallTensor(index, shape) for index, shape in enumerate(shapes)]
    with pytest.raises(torchop.ShardingError, match=f"^ns::op: .*{message}"):
        list(rows("ns::op", sharding(text), tensors, results))


def test_a_written_argument_is_not_broadcast() -> None:
    tensors = [CallTensor(0, (1,), True), CallTensor(1, (4,))]
    with pytest.raises(torchop.ShardingError, match=r"argument 0 of shape .1. has 1, others have"):
        list(rows("ns::op", sharding("..., ... ->"), tensors, []))
