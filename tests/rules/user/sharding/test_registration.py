"""Sharding rules can be registered for any operator, and are removed together with it.

Uses private names.
"""

from __future__ import annotations

from typing import Any, Optional

import pytest
import torch

import torchop
from tests._support.common import assert_clean
from tests._support.forking import run_forked
from tests.rules.user.sharding.operators import X, define, sine
from tests.rules.user.sharding.ranks import assert_right, on_mesh, words
from torchop._rules.user.sharding import register_sharding


def test_operators_may_share_a_rule(namespace: str, mesh: Any) -> None:
    rule = torchop.sharding("... d -> ... d", linear=("x",))
    first = sine(namespace)
    second = define(
        f"{namespace}b",
        "(Tensor w, Tensor x) -> Tensor",
        torch.mul,
        lambda w, x: torch.empty_like(x),
        mutates_args=(),
    )
    first.register_sharding(rule)
    with pytest.raises(torchop.ShardingRuleError, match=r"the operator takes 2 tensors \(w, x\)"):
        second.register_sharding(rule)
    shared = torchop.sharding("..., ... -> ...", linear=("x",))
    third = define(
        f"{namespace}c",
        "(Tensor x, Tensor w) -> Tensor",
        torch.mul,
        lambda x, w: torch.empty_like(x),
        mutates_args=(),
    )
    second.register_sharding(shared)
    third.register_sharding(shared)
    assert repr(shared) == "torchop.sharding('..., ... -> ...', linear=(('x',),))"
    pending, replicated = on_mesh(mesh, X, "P"), on_mesh(mesh, X)
    assert_right(second(replicated, pending), X * X, "P")
    assert_right(third(pending, replicated), X * X, "P")


def test_a_rule_for_an_operator_of_pytorch_replaces_the_one_of_dtensor(mesh: Any) -> None:
    def placements() -> list[str]:
        # DTensor caches its decision for this call. When a rule is registered for `topk`, the cache
        # must be cleared.
        return [words(result) for result in torch.topk(on_mesh(mesh, X, "S0"), 1)]

    before = placements()
    assert before == ["S0", "S0"]
    with torchop.Library("aten", "IMPL") as library:
        register_sharding(torch.ops.aten.topk.default, "replicate", lib=library)
        assert placements() == ["R", "R"]
    assert placements() == before


def test_in_place_results_have_the_operand_of_the_argument(namespace: str) -> None:
    op = sine(namespace)
    op.derive_inplace()
    with pytest.raises(torchop.ShardingRuleError, match="result 0 is the argument 'x', so both"):
        op.inplace.register_sharding("a b -> b a")


def test_unhashed_arguments_are_not_in_the_key(namespace: str, mesh: Any) -> None:
    def calls_of(unhashed: tuple[str, ...], name: str) -> int:
        op = define(
            name,
            "(Tensor x, *, float lr, float? eps=None) -> Tensor",
            lambda x, *, lr, eps: x * lr,
            lambda x, *, lr, eps: torch.empty_like(x),
            mutates_args=(),
        )
        calls = []

        @op.register_sharding(unhashed=unhashed)
        def _(x: Any, *, lr: float, eps: Optional[float]) -> str:
            calls.append(lr)
            return "... -> ..."

        x = on_mesh(mesh, X, "S0")
        for step in range(3):
            assert_right(op(x, lr=float(step)), X * step, "S0")
        return len(calls)

    assert calls_of((), namespace) == 3
    assert calls_of(("lr", "eps"), f"{namespace}b") == 1


def test_importing_torchop_imports_no_dtensor() -> None:
    source = """
        import sys, torch, torchop
        op = torchop.custom_op("t::op", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
        op.register_sharding("pointwise")
        other = torchop.custom_op("t::b", torch.sin, mutates_args=(), schema="(Tensor x) -> Tensor")
        assert "torch.distributed.tensor" not in sys.modules
        from torch.distributed.tensor import DTensor
        strategies = DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs
        print(op.overload in strategies, other.overload in strategies)
        op._definition.deregister("over")
        print(any("t.op" in str(op) for op in strategies))
    """
    assert assert_clean(run_forked(source)).splitlines() == ["True False", "False"]


def test_redefinition_drops_the_sharding_rule(namespace: str, mesh: Any) -> None:
    op = sine(namespace)
    op.register_sharding("pointwise")
    x = on_mesh(mesh, X, "S0")
    assert words(op(x)) == "S0"
    op = sine(namespace)
    with pytest.raises(torchop.MissingRuleError):
        op(x)
    op.register_sharding("replicate")
    assert words(op(x)) == "R"
