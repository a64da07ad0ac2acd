from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchop
from tests.rules.user.sharding.operators import X, define, sine
from tests.rules.user.sharding.ranks import assert_right, on_mesh, words

VALUES = {"sharding": "pointwise"}


def test_a_pointwise_operator(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding("pointwise")
    assert "sharding" in repr(op)
    assert_right(op(on_mesh(mesh, X, "S0")), X.sin(), "S0")
    assert_right(op(on_mesh(mesh, X, "S1")), X.sin(), "S1")
    assert_right(op(on_mesh(mesh, X)), X.sin(), "R")
    assert_right(op(on_mesh(mesh, X, "P")), X.sin())
    assert_right(op(on_mesh(mesh, X[:3], "S0")), X[:3].sin(), "S0")
    assert_right(getattr(torch.ops, namespace).op(on_mesh(mesh, X, "S0")), X.sin(), "S0")


def test_several_mesh_dimensions(namespace: str, square: Any) -> None:
    op = define(
        namespace,
        "(Tensor a, Tensor b) -> Tensor",
        torch.mm,
        lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
        mutates_args=(),
    )
    op.register_sharding("b k, k n -> b n", reduce={"k": "sum"}, linear=(0, 1))
    b = X.t().contiguous()
    a_placed = {"S0 S1": "S0 P", "S1 S1": "P P", "S0 S0": "S0 S0", "R S0": "R S0"}
    for placed, expected in a_placed.items():
        right = on_mesh(square, b, placed.replace("S0", "R").replace("S1", "S0"))
        assert_right(op(on_mesh(square, X, placed), right), X @ b, expected)
    assert_right(op(on_mesh(square, X, "P R"), on_mesh(square, b, "R S1")), X @ b, "P S1")


def test_the_words(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding("batch")
    assert words(op(on_mesh(mesh, X, "S0"))) == "S0"
    assert_right(op(on_mesh(mesh, X, "S1")), X.sin())
    assert words(op(on_mesh(mesh, X, "S1"))) in ("R", "S0")
    op.register_sharding("replicate")
    assert_right(op(on_mesh(mesh, X, "S0")), X.sin(), "R")


@dataclasses.dataclass(frozen=True)
class Options:
    scale: Tensor
    power: float = 2.0


def test_structured_arguments(namespace: str, mesh: Any) -> None:
    @torchop.custom_op(f"{namespace}::op", mutates_args=())
    def op(x: Tensor, options: Options) -> Tensor:
        return x * options.scale**options.power

    op.register_fake(lambda x, options: torch.empty_like(x))
    seen = []

    @op.register_sharding
    def _(x: Any, options: Options) -> str:
        seen.append((x.ndim, options.scale.shape, options.scale.dtype, options.power))
        return "b d, d -> b d"

    options = Options(on_mesh(mesh, X[0], "R"), 3.0)
    assert_right(op(on_mesh(mesh, X, "S1"), options), X * X[0] ** 3, "S1")
    assert seen[-1] == (2, (8,), torch.float32, 3.0)
    with pytest.raises(torchop.ShardingRuleError, match=r"2 tensors \(x, options_scale\)"):
        op.register_sharding("b d -> b d")


def test_lists_two_results_optional_tensors(namespace: str, mesh: Any) -> None:
    total = define(
        namespace,
        "(Tensor[] xs, float scale=1.0) -> Tensor",
        lambda xs, scale: sum(xs) * scale,
        lambda xs, scale: torch.empty_like(xs[0]),
        mutates_args=(),
    )
    total.register_sharding("[...] -> ...", linear=(0,))
    xs = [on_mesh(mesh, X, "S0"), on_mesh(mesh, X, "R"), on_mesh(mesh, X, "S1")]
    assert_right(total(xs, 2.0), X * 6)
    assert_right(total([on_mesh(mesh, X, "P")] * 2), X * 2, "P")

    two = define(
        f"{namespace}b",
        "(Tensor x) -> (Tensor, Tensor)",
        lambda x: (x + 1, x.sum(-1)),
        lambda x: (torch.empty_like(x), x.new_empty(x.shape[:-1])),
        mutates_args=(),
    )
    two.register_sharding("... d -> ... d, ...", reduce={"d": "sum"})
    first, second = two(on_mesh(mesh, X, "S1"))
    assert_right(first, X + 1, "S1")
    assert_right(second, X.sum(-1), "P")

    optional = define(
        f"{namespace}c",
        "(Tensor x, Tensor? b=None) -> Tensor",
        lambda x, b: x + 1 if b is None else x + b,
        lambda x, b: torch.empty_like(x),
        mutates_args=(),
    )
    optional.register_sharding("... d, d -> ... d")
    assert_right(optional(on_mesh(mesh, X, "S1")), X + 1, "S1")
    assert_right(optional(on_mesh(mesh, X, "S1"), on_mesh(mesh, X[0], "R")), X + X[0], "S1")


def test_list_results(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, int n) -> Tensor[]",
        lambda x, n: [x + i for i in range(n)],
        lambda x, n: [torch.empty_like(x) for _ in range(n)],
        mutates_args=(),
    )
    op.register_sharding("... -> [...]")
    x = on_mesh(mesh, X, "S0")
    for count in (2, 3):
        for index, value in enumerate(op(x, count)):
            assert_right(value, X + index, "S0")


def test_reductions(namespace: str, mesh: Any) -> None:
    for number, (how, function) in enumerate(
        {"sum": torch.sum, "max": torch.amax, "min": torch.amin, "avg": torch.mean}.items()
    ):
        op = define(
            f"{namespace}n{number}",
            "(Tensor input) -> Tensor",
            functools.partial(function, dim=-1),
            lambda x: x.new_empty(x.shape[:-1]),
            mutates_args=(),
        )
        op.register_sharding("... d -> ...", reduce={"d": how})
        value = op(on_mesh(mesh, X, "S1"))
        assert words(value) == ("P" if how == "sum" else f"Partial({how})")
        assert_right(value, function(X, dim=-1))
        # DTensor must gather the columns before these calls. With 7 columns, the shards have
        # different sizes, so the mean of their means is incorrect. With 1 column, one shard is
        # empty and has no maximum.
        assert_right(op(on_mesh(mesh, X[:, :7], "S1")), function(X[:, :7], dim=-1))
        assert_right(op(on_mesh(mesh, X[:, :1], "S1")), function(X[:, :1], dim=-1))


def test_a_function_of_the_other_arguments(namespace: str, mesh: Any) -> None:
    op = define(
        namespace,
        "(Tensor x, int[] dims) -> Tensor",
        lambda x, dims: x.sum(tuple(dims), keepdim=True),
        lambda x, dims: x.sum(tuple(dims), keepdim=True),
        mutates_args=(),
    )

    @op.register_sharding
    def rule(x: Any, dims: Sequence[int]) -> Any:
        names = [f"d{i}" for i in range(x.ndim)]
        gone = {names[d] for d in dims}
        results = ["." if name in gone else name for name in names]
        return torchop.sharding(
            f"{' '.join(names)} -> {' '.join(results)}", reduce=dict.fromkeys(gone, "sum")
        )

    x = on_mesh(mesh, X, "S0")
    assert_right(op(x, [1]), X.sum(1, keepdim=True), "S0")
    assert_right(op(x, [0]), X.sum(0, keepdim=True), "P")
    assert_right(op(x, [0, 1]), X.sum((0, 1), keepdim=True), "P")
    op.register_sharding(lambda x, dims: 3)
    with pytest.raises(torchop.ShardingError, match=r"got 3. The function that chooses the rule"):
        op(x, [1])
    op.register_sharding(lambda x, dims: "a -> a")
    with pytest.raises(torchop.ShardingError, match="'a' of the sharding rule 'a -> a' does not"):
        op(x, [1])
